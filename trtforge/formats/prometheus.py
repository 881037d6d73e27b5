"""Parses Prometheus' text format, in which Triton, TensorRT-LLM's backend and the gateway report metrics."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trtforge.core.errors import ForgeError

REQUESTS, KV_BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
BATCHER, GENERAL = "nv_trt_llm_inflight_batcher_metrics", "nv_trt_llm_general_metrics"
"""Gauges of TensorRT-LLM's backend, which trtforge's engines report too (docs/deployment.md)."""
ENDED, ENDED_SECONDS = "trtforge_requests", "trtforge_request_seconds"
"""How requests ended, of trtforge's engines only."""
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+([^\s]+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPED = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
_MOST_SAMPLES = 100_000


@dataclass(frozen=True)
class Sample:
    """One line: a metric, its labels and its value."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_metrics(text: str, where: str) -> tuple[Sample, ...]:
    """The samples of a text. Raises ForgeError naming `where` and an invalid line. Values that are not finite are left
    out.

    A last line without line feed is ignored, as the answer was cut there.
    """
    found = []
    lines = text.split("\n")[:-1]
    if len(lines) > _MOST_SAMPLES:
        raise ForgeError(f"{where}: more than {_MOST_SAMPLES:,} lines of metrics", hint="Give another address.")
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        sample = _sample(line.strip())
        if sample is None:
            raise ForgeError(
                f"{where}: line {number} is not of Prometheus' text format: {line.strip()!r:.60}",
                hint="Give the address of a server's metrics, such as 127.0.0.1:8002.",
            )
        if math.isfinite(sample.value):
            found.append(sample)
    return tuple(found)


def _sample(line: str) -> Sample | None:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        return None
    labels, rest = {}, match[2] or ""
    while rest:
        label = _LABEL.match(rest)
        if label is None:
            return None
        labels[label[1]] = re.sub(r'\\[n"\\]', lambda found: _ESCAPED[found[0]], label[2])
        rest = rest[label.end() :]
    try:
        return Sample(match[1], labels, float(match[3]))
    except ValueError:
        return None
