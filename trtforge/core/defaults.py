"""Defaults that a configuration model and a command-line option share. Imports little, so that `--help` is fast."""

from typing import Final

TENSORRT_LLM = "1.2.1"
"""TensorRT-LLM release: the last one with TensorRT engines."""

CALIBRATION_DATA = "builtin:stdlib"
"""Documentation of Python's standard library."""
CALIBRATION_SAMPLES, CALIBRATION_TOKENS, CALIBRATION_BATCH_SIZE = 128, 512, 8
GROUP_SIZE: Final = 128
GATE_SAMPLES, GATE_TOKENS = 32, 256

MAX_BATCH_SIZE = 64

LOOPBACK = "127.0.0.1"
HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002
GATEWAY_PORT = 8080
NAMESPACE, MONITORING = "trtforge", "monitoring"
"""Namespaces of Kubernetes: of a deployment, and of Prometheus."""
HTTP_URL, GRPC_URL = f"{LOOPBACK}:{HTTP_PORT}", f"{LOOPBACK}:{GRPC_PORT}"
METRICS_URL = f"{LOOPBACK}:{METRICS_PORT}"
READY_TIMEOUT = 600.0  # seconds: large engines load slowly
DRAIN_TIMEOUT = 30.0  # seconds

MOST_FACTOR = 1e30
"""The largest temperature or penalty, and the inverse of the smallest, so that logits stay in float32's range."""

_KV_CACHE_DIR_GB = 8
KV_CACHE_DIR_SIZE, KV_CACHE_DIR_BYTES = f"{_KV_CACHE_DIR_GB}GB", _KV_CACHE_DIR_GB * 10**9
"""Size limit of the embedded engine's KV blocks in files, as text and in bytes."""
