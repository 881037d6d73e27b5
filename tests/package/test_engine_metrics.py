"""The engine's figures as gauges, by the names of TensorRT-LLM's backend."""

import sys
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest

from trtforge.core.assets import asset_directory
from trtforge.engine_process.ended_requests import EndedRequests
from trtforge.runtime.options import EngineStatistics

OF_THE_PROCESS = tuple(EndedRequests().figures())
NAMES = (*(each.name for each in fields(EngineStatistics)), *OF_THE_PROCESS)
COUNTS = {name: index for index, name in enumerate(NAMES, start=1)}


@dataclass
class Gauge:
    """A gauge that remembers what it was set to."""

    labels: dict[str, str]
    values: list[float] = field(default_factory=list)

    def set(self, value: float) -> None:
        self.values.append(value)


class Family:
    """A family of gauges; `made` has those of all families by family and last label."""

    GAUGE = object()
    made: ClassVar[dict[tuple[str, str], Gauge]] = {}

    def __init__(self, name: str, description: str, kind: object) -> None:
        self._name = name

    def Metric(self, labels: dict[str, str]) -> Gauge:
        gauge = Gauge(labels)
        Family.made[self._name, list(labels.values())[-1]] = gauge
        return gauge


@pytest.fixture
def gauges() -> dict[tuple[str, str], Gauge]:
    """The gauges after an update with figures that all differ."""
    Family.made.clear()
    utilities: Any = SimpleNamespace(MetricFamily=Family, Metric=Gauge)
    with (
        patch.dict(sys.modules, {"triton_python_backend_utils": utilities}),
        patch.object(sys, "path", [str(asset_directory("model_repo_templates") / "lib"), *sys.path]),
    ):
        sys.modules.pop("engine_metrics", None)
        from engine_metrics import EngineMetrics  # type: ignore[import-not-found]

        metrics = EngineMetrics("tensorrt_llm", "1")
        metrics.update(COUNTS)
        metrics.update(COUNTS)
        sys.modules.pop("engine_metrics")
    return Family.made


def test_blocks_of_all_pools_are_gauges(gauges: dict[tuple[str, str], Gauge]) -> None:
    blocks = {kind: gauge.values for (name, kind), gauge in gauges.items() if "block" in name}
    names = {"max": "max", "free": "free", "used": "used", "reused": "reused"}
    expected = {kind: [COUNTS[f"kv_blocks_{name}"]] for kind, name in names.items()}
    expected |= {f"window_{kind}": [COUNTS[f"kv_window_blocks_{kind}"]] for kind in ("max", "used")}
    expected |= {f"host_{kind}": [COUNTS[f"kv_host_blocks_{kind}"]] for kind in ("max", "used", "onboarded")}
    fraction = COUNTS["kv_blocks_used"] / COUNTS["kv_blocks_max"]
    assert blocks == expected | {"tokens_per": [COUNTS["tokens_per_block"]], "fraction": [fraction]}


def test_every_gauge_is_a_figure_of_the_engine(gauges: dict[tuple[str, str], Gauge]) -> None:
    """One whose name the engine does not have would stay at 0."""
    assert all(gauge.values for gauge in gauges.values())
    assert all(gauge.labels["model"] == "tensorrt_llm" for gauge in gauges.values())
