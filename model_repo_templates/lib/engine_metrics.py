"""The engine's state as the Prometheus gauges of TensorRT-LLM's backend, and as more of trtforge's own."""

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
        "Seconds from the arrival of requests to their end, together, since the start",
        "ended",
        {"answered": "answered_seconds"},
    ),
    ("nv_trt_llm_general_metrics", "General TRT LLM metrics", "general_type", {"iteration_counter": "iterations"}),
)
"""Family, help text, label, and the figure of each of the label's values; names: custom_metrics_reporter.cc of
TensorRT-LLM's backend, which has none of speculation, of the ends of requests and of blocks in host memory."""


def _fraction(figures: _Figures) -> float:
    return figures["kv_blocks_used"] / figures["kv_blocks_max"] if figures.get("kv_blocks_max") else 0.0


_DERIVED: Mapping[str, Mapping[str, Callable[[_Figures], float]]] = {
    "nv_trt_llm_kv_cache_block_metrics": {"fraction": _fraction},
    "nv_trt_llm_general_metrics": {"timestamp": lambda figures: time.time()},
}


class EngineMetrics:
    """Sets the gauges from an engine's figures; figures that an engine does not have stay at 0.

    What only grows is a gauge, too, as in TensorRT-LLM's backend and in repositories of earlier versions: Triton does
    not load a model whose family of metrics another model has with another type.
    """

    def __init__(self, model: str, version: str) -> None:
        self._gauges: list[tuple[object, pb_utils.Metric, Callable[[_Figures], float]]] = []
        self._values: dict[int, float] = {}
        for name, description, label, values in _FAMILIES:
            family = pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.GAUGE)
            reads = {value: _read(figure) for value, figure in values.items()} | dict(_DERIVED.get(name, {}))
            for value, read in reads.items():
                labels = {"model": model, "version": version, label: value}
                self._gauges.append((family, family.Metric(labels=labels), read))

    def update(self, figures: _Figures) -> None:
        """Set the gauges that have changed, because each call costs a round trip to the server."""
        for number, (_, gauge, read) in enumerate(self._gauges):
            value = read(figures)
            if self._values.get(number) != value:
                self._values[number] = value
                gauge.set(value)


def _read(figure: str) -> Callable[[_Figures], float]:
    return lambda figures: figures.get(figure, 0.0)
