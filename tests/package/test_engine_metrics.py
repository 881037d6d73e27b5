"""The engine's figures as metrics, by the names of TensorRT-LLM's backend."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
class Recorded:
    """A metric that remembers its values."""

    kind: str
    labels: dict[str, str]
    values: list[float] = field(default_factory=list)

    def set(self, value: float) -> None:
        self.values.append(value)


class Family:
    """A family of metrics; `made` has those of all families by family and last label."""

    GAUGE = "gauge"
    made: ClassVar[dict[tuple[str, str], Recorded]] = {}

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._name, self._kind = name, kind

    def Metric(self, labels: dict[str, str]) -> Recorded:
        metric = Recorded(self._kind, labels)
        Family.made[self._name, list(labels.values())[-1]] = metric
        return metric


@contextmanager
def library() -> Iterator[Any]:
    """The module, with these metrics instead of Triton's."""
    Family.made.clear()
    utilities: Any = SimpleNamespace(MetricFamily=Family, Metric=Recorded)
    with (
        patch.dict(sys.modules, {"triton_python_backend_utils": utilities}),
        patch.object(sys, "path", [str(asset_directory("model_repo_templates") / "lib"), *sys.path]),
    ):
        sys.modules.pop("engine_metrics", None)
        yield importlib.import_module("engine_metrics")
        sys.modules.pop("engine_metrics")


@pytest.fixture
def metrics() -> dict[tuple[str, str], Recorded]:
    """The metrics after two updates with figures that all differ."""
    with library() as engine_metrics:
        made = engine_metrics.EngineMetrics("tensorrt_llm", "1")
        made.update(COUNTS)
        made.update(COUNTS)
    return Family.made


def test_blocks_of_all_pools_are_gauges(metrics: dict[tuple[str, str], Recorded]) -> None:
    blocks = {kind: metric.values for (name, kind), metric in metrics.items() if "block" in name}
    names = {"max": "max", "free": "free", "used": "used", "reused": "reused"}
    expected = {kind: [COUNTS[f"kv_blocks_{name}"]] for kind, name in names.items()}
    expected |= {f"window_{kind}": [COUNTS[f"kv_window_blocks_{kind}"]] for kind in ("max", "used")}
    expected |= {f"host_{kind}": [COUNTS[f"kv_host_blocks_{kind}"]] for kind in ("max", "used", "onboarded")}
    fraction = COUNTS["kv_blocks_used"] / COUNTS["kv_blocks_max"]
    assert blocks == expected | {"tokens_per": [COUNTS["tokens_per_block"]], "fraction": [fraction]}


def test_every_metric_is_a_figure_of_the_engine(metrics: dict[tuple[str, str], Recorded]) -> None:
    """One whose name the engine does not have would stay at 0."""
    assert all(metric.values for metric in metrics.values())
    assert all(metric.labels["model"] == "tensorrt_llm" for metric in metrics.values())


def test_all_metrics_are_gauges_as_in_repositories_of_earlier_versions(
    metrics: dict[tuple[str, str], Recorded],
) -> None:
    """Models of both may be in one Triton server, which loads no family of two types."""
    assert {metric.kind for metric in metrics.values()} == {"gauge"}


def test_only_what_has_changed_is_set() -> None:
    with library() as engine_metrics:
        made = engine_metrics.EngineMetrics("tensorrt_llm", "1")
        for answered in (3, 3, 8):
            made.update({"answered_requests": answered})
    assert Family.made["trtforge_requests", "answered"].values == [3, 8]
    assert Family.made["trtforge_requests", "late"].values == [0]
