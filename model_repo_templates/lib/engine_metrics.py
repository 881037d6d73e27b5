"""The engine's state as the Prometheus gauges of TensorRT-LLM's backend, and counters that this backend lacks."""

import time
from collections.abc import Callable, Mapping

import triton_python_backend_utils as pb_utils

_Figures = Mapping[str, float]

_FAMILIES: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    (
        "nv_trt_llm_request_metrics",
        "TRT LLM request metrics",
        "request_type",
        {
            "active": "active_requests",
            "max": "max_requests",
            "scheduled": "scheduled_requests",
            "waiting": "waiting_requests",
        },
    ),
    (
        "nv_trt_llm_kv_cache_block_metrics",
        "TRT LLM KV cache block metrics",
        "kv_cache_block_type",
        {
            "max": "kv_blocks_max",
            "free": "kv_blocks_free",
            "used": "kv_blocks_used",
            "tokens_per": "tokens_per_block",
            "reused": "kv_blocks_reused",
            "window_max": "kv_window_blocks_max",
            "window_used": "kv_window_blocks_used",
            "host_max": "kv_host_blocks_max",
            "host_used": "kv_host_blocks_used",
            "host_onboarded": "kv_host_blocks_onboarded",
        },
    ),
    (
        "nv_trt_llm_inflight_batcher_metrics",
        "TRT LLM inflight_batcher-specific metrics",
        "inflight_batcher_specific_metric",
        {"total_context_tokens": "context_tokens", "paused_requests": "paused_requests"},
    ),
    (
        "trtforge_speculative_decoding",
        "Draft tokens that speculative decoding verified, and accepted ones of these",
        "draft_tokens",
        {"drafted": "drafted_tokens", "accepted": "accepted_tokens"},
    ),
    (
        "trtforge_requests",
        "Requests by how they ended: invalid ones cannot be served, late ones passed a deadline or the longest wait",
        "ended",
        {
            "answered": "answered_requests",
            "refused": "refused_requests",
            "invalid": "invalid_requests",
            "late": "late_requests",
            "failed": "failed_requests",
        },
    ),
    (
        "trtforge_request_seconds",
        "Seconds from the arrival of requests to their end, together",
        "ended",
        {"answered": "answered_seconds"},
    ),
    ("nv_trt_llm_general_metrics", "General TRT LLM metrics", "general_type", {"iteration_counter": "iterations"}),
)
"""Family, help text, label, and the figure of each of the label's values; names: custom_metrics_reporter.cc of
TensorRT-LLM's backend, which has none of speculation, of the ends of requests and of blocks in host memory."""

_COUNTERS = frozenset(("trtforge_speculative_decoding", "trtforge_requests", "trtforge_request_seconds"))
"""Families that only grow. Those of TensorRT-LLM's backend are gauges there, whatever they count."""


def _fraction(figures: _Figures) -> float:
    return figures["kv_blocks_used"] / figures["kv_blocks_max"] if figures.get("kv_blocks_max") else 0.0


_DERIVED: Mapping[str, Mapping[str, Callable[[_Figures], float]]] = {
    "nv_trt_llm_kv_cache_block_metrics": {"fraction": _fraction},
    "nv_trt_llm_general_metrics": {"timestamp": lambda figures: time.time()},
}


class EngineMetrics:
    """Sets the metrics from an engine's figures; figures that an engine does not have stay at 0."""

    def __init__(self, model: str, version: str) -> None:
        self._metrics: list[tuple[object, pb_utils.Metric, bool, Callable[[_Figures], float]]] = []
        self._values: dict[int, float] = {}
        for name, description, label, values in _FAMILIES:
            counts = name in _COUNTERS
            kind = pb_utils.MetricFamily.COUNTER if counts else pb_utils.MetricFamily.GAUGE
            family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
            reads = {value: _read(figure) for value, figure in values.items()} | dict(_DERIVED.get(name, {}))
            for value, read in reads.items():
                labels = {"model": model, "version": version, label: value}
                self._metrics.append((family, family.Metric(labels=labels), counts, read))

    def update(self, figures: _Figures) -> None:
        """Set the metrics that have changed, because each call costs a round trip to the server."""
        for number, (_, metric, counts, read) in enumerate(self._metrics):
            value, before = read(figures), self._values.get(number)
            if value == before:
                continue
            self._values[number] = value
            if counts:
                metric.increment(value - (before or 0.0))
            else:
                metric.set(value)


def _read(figure: str) -> Callable[[_Figures], float]:
    return lambda figures: figures.get(figure, 0.0)
