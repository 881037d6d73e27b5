"""The Grafana dashboard: requests, KV cache, iterations, latencies and GPUs of the selected pods."""

from collections.abc import Mapping, Sequence
from typing import Any

from trtforge.deploy import metrics
from trtforge.formats.prometheus import REQUESTS

_LONGEST_UID = 40
_PODS = 'namespace="$namespace",pod=~"$pod"'
_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2
_INTERVAL = "[$__rate_interval]"


def dashboard(name: str, *, gpus: bool, counted: bool) -> Mapping[str, Any]:
    """The JSON model of a deployment's dashboard, with variables for data source, namespace and pod.

    `gpus`: with panels of GPUs; `counted`: the engine is one of trtforge's, which count pauses and the ends of
    requests since their start.
    """
    panels = [*_panels(counted=counted), *(_gpu_panels() if gpus else ())]
    return {
        "title": f"trtforge: {name}",
        "uid": name[:_LONGEST_UID],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                _choice("namespace", f"label_values({REQUESTS}, namespace)", several=False),
                _choice("pod", f'label_values({REQUESTS}{{namespace="$namespace"}}, pod)', several=True),
            ]
        },
        "panels": [{**panel, **_place(number)} for number, panel in enumerate(panels)],
    }


def _panels(*, counted: bool) -> tuple[Mapping[str, Any], ...]:
    paused = f"sum(increase({metrics.PAUSED}{_INTERVAL}))" if counted else f"sum({metrics.PAUSED})"
    return (
        _panel(
            "Requests in the engine",
            "short",
            (f"sum({metrics.SCHEDULED})", "running"),
            (f"sum({metrics.WAITING})", "waiting"),
            (f"sum({metrics.MOST_ACTIVE})", "most at once"),
        ),
        _panel("KV cache in use", "percentunit", (metrics.KV_FRACTION, "{{pod}}")),
        *(_counted_panels() if counted else _triton_panels()),
        _panel("Iterations", "iops", (f"rate({metrics.ITERATIONS}{_INTERVAL})", "{{pod}}")),
        _panel(
            "Paused, and pending in Triton",
            "short",
            (paused, "paused"),
            (f"sum by (model) ({metrics.PENDING}{{PODS}})", "pending in {{model}}"),
        ),
    )


def _counted_panels() -> tuple[Mapping[str, Any], ...]:
    seconds, answered = (f"sum(rate({each}{_INTERVAL}))" for each in (metrics.ANSWERED_SECONDS, metrics.ANSWERED))
    return (
        _panel(
            "Requests by their end",
            "reqps",
            (f"sum by (ended) (rate({metrics.ENDS}{_INTERVAL}))", "{{ended}}"),
        ),
        _panel("Time of an answered request, mean", "s", (f"{seconds} / {answered}", "mean")),
    )


def _triton_panels() -> tuple[Mapping[str, Any], ...]:
    answered = f"({_rate(metrics.SUCCESS)} + {_rate(metrics.FAILURE)})"
    return (
        _panel(
            "Requests answered",
            "reqps",
            (_rate(metrics.SUCCESS), "{{model}}"),
            (_rate(metrics.FAILURE), "{{model}} failed"),
        ),
        _panel("Time of a request, mean", "µs", (f"{_rate(metrics.DURATION)} / {answered}", "{{model}}")),
    )


def _gpu_panels() -> tuple[Mapping[str, Any], ...]:
    name = "{{pod}} {{gpu_uuid}}"
    return (
        _panel("GPU utilisation", "percentunit", (f"{metrics.GPU_USE}{{PODS}}", name)),
        _panel("GPU memory in use", "bytes", (f"{metrics.GPU_MEMORY}{{PODS}}", name)),
    )


def _rate(counter: str) -> str:
    return f"sum by (model) (rate({counter}{{PODS}}{_INTERVAL}))"


def _panel(title: str, unit: str, *series: tuple[str, str]) -> Mapping[str, Any]:
    return {
        "title": title,
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": _targets(series),
    }


def _targets(series: Sequence[tuple[str, str]]) -> list[Mapping[str, str]]:
    return [
        {"refId": chr(ord("A") + number), "expr": expression.replace("PODS", _PODS), "legendFormat": legend}
        for number, (expression, legend) in enumerate(series)
    ]


def _place(number: int) -> Mapping[str, Any]:
    across, down = number % _COLUMNS, number // _COLUMNS
    return {"id": number + 1, "gridPos": {"x": across * _WIDTH, "y": down * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}}


def _choice(name: str, query: str, *, several: bool) -> Mapping[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "name": name,
        "type": "query",
        "datasource": source,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": several,
        "includeAll": several,
    }
