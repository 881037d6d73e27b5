"""Metrics of a server by name, and the PromQL expressions of alerts, autoscaling and dashboard.

Requests and KV blocks are gauges of the engine's executor: it takes requests from Triton at once, so Triton's own queue
is empty however many requests wait. Triton counts a request as a success once trtforge's models have taken it; how it
ended is a gauge of trtforge's engines, which TensorRT-LLM's backend lacks.
"""

import re

from trtforge.deploy.values import Text, Value, text
from trtforge.formats.prometheus import BATCHER, ENDED, ENDED_SECONDS, GENERAL, KV_BLOCKS, REQUESTS

SUCCESS, FAILURE = "nv_inference_request_success", "nv_inference_request_failure"
DURATION = "nv_inference_request_duration_us"
PENDING = "nv_inference_pending_request_count"
GPU_USE, GPU_MEMORY = "nv_gpu_utilization", "nv_gpu_memory_used_bytes"
"""Triton's own; the last two only where there are GPUs."""

INSTANCE_LABEL = "app.kubernetes.io/instance"
"""The label of pods that PodMonitors copy to metrics; Prometheus replaces dots and slashes in its name."""
_INSTANCE = re.sub(r"[^a-zA-Z0-9]", "_", INSTANCE_LABEL)

WAITING = f'{REQUESTS}{{request_type="waiting",PODS}}'
SCHEDULED = f'{REQUESTS}{{request_type="scheduled",PODS}}'
ACTIVE = f'{REQUESTS}{{request_type="active",PODS}}'
MOST_ACTIVE = f'{REQUESTS}{{request_type="max",PODS}}'
KV_FRACTION = f'{KV_BLOCKS}{{kv_cache_block_type="fraction",PODS}}'
PAUSED = f'{BATCHER}{{inflight_batcher_specific_metric="paused_requests",PODS}}'
ITERATIONS = f'{GENERAL}{{general_type="iteration_counter",PODS}}'
ENDS = f"{ENDED}{{PODS}}"
ANSWERED = f'{ENDED}{{ended="answered",PODS}}'
SERVER_FAILED = f'{ENDED}{{ended!~"answered|invalid",PODS}}'
ANSWERED_SECONDS = f'{ENDED_SECONDS}{{ended="answered",PODS}}'
FULL = f"{ACTIVE} / ignoring (request_type) {MOST_ACTIVE}"
"""Running and waiting requests, as a share of the most that the engine can run at once: more than 1 if many wait."""


def of_pods(expression: str, name: Value, namespace: Value) -> Text:
    """A PromQL expression in which PODS is replaced by the labels of a deployment's pods."""
    selector = text('namespace="', namespace, f'",{_INSTANCE}="', name, '"')
    first, *others = expression.split("PODS")
    whole = text(first)
    for other in others:
        whole = text(whole, selector, other)
    return whole
