"""The embedded engine's state as the Prometheus gauges that TensorRT-LLM's backend has."""

import threading
import time
from collections.abc import Callable, Mapping

import triton_python_backend_utils as pb_utils

from trtforge.runtime.engine import Engine, EngineStatistics

_Value = Callable[[EngineStatistics], float]

_FAMILIES: tuple[tuple[str, str, str, Mapping[str, _Value]], ...] = (
    (
        "nv_trt_llm_request_metrics",
        "TRT LLM request metrics",
        "request_type",
        {
            "active": lambda s: s.active_requests,
            "max": lambda s: s.max_requests,
            "scheduled": lambda s: s.scheduled_requests,
            "waiting": lambda s: s.waiting_requests,
        },
    ),
    (
        "nv_trt_llm_kv_cache_block_metrics",
        "TRT LLM KV cache block metrics",
        "kv_cache_block_type",
        {
            "max": lambda s: s.kv_blocks_max,
            "free": lambda s: s.kv_blocks_free,
            "used": lambda s: s.kv_blocks_used,
            "tokens_per": lambda s: s.tokens_per_block,
            "reused": lambda s: s.kv_blocks_reused,
            "fraction": lambda s: s.kv_blocks_used / s.kv_blocks_max if s.kv_blocks_max else 0.0,
        },
    ),
    (
        "nv_trt_llm_inflight_batcher_metrics",
        "TRT LLM inflight_batcher-specific metrics",
        "inflight_batcher_specific_metric",
        {"total_context_tokens": lambda s: s.context_tokens, "paused_requests": lambda s: s.paused_requests},
    ),
    (
        "nv_trt_llm_general_metrics",
        "General TRT LLM metrics",
        "general_type",
        {"iteration_counter": lambda s: s.iterations, "timestamp": lambda s: time.time()},
    ),
)
"""Family, help text, label and the label's values; names: custom_metrics_reporter.cc of TensorRT-LLM's backend."""


class EngineMetrics:
    """Sets the gauges from the engine's statistics."""

    def __init__(self, engine: Engine, model: str, version: str) -> None:
        self._engine = engine
        self._gauges = []
        for name, description, label, values in _FAMILIES:
            family = pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.GAUGE)
            for value, read in values.items():
                labels = {"model": model, "version": version, label: value}
                self._gauges.append((family, family.Metric(labels=labels), read))

    def start(self, period_ms: int) -> None:
        """Update the gauges every `period_ms` on a thread of their own."""
        threading.Thread(target=self._run, args=(period_ms / 1000,), name="metrics", daemon=True).start()

    def _run(self, period: float) -> None:
        while True:
            statistics = self._engine.statistics()
            for _, gauge, read in self._gauges:
                gauge.set(read(statistics))
            time.sleep(period)
