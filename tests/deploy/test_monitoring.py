"""Alerts, autoscaling and dashboard: expressions that Prometheus parses, of metrics that the server exports."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
from promql_parser import (
    AggregateExpr,
    BinaryExpr,
    Call,
    Expr,
    MatrixSelector,
    NumberLiteral,
    ParenExpr,
    UnaryExpr,
    VectorSelector,
)

from tests.deploy.objects import Object, objects
from trtforge.deploy import metrics
from trtforge.deploy.scaling import FULLEST

DOCS = Path(__file__).parents[2] / "docs" / "deployment.md"
TRITON = {
    name for name in vars(metrics).values() if isinstance(name, str) and re.fullmatch(r"nv_(inference|gpu)_\w+", name)
}
"""Triton's own; tests/serve/test_deployed.py asks the server for them."""


def selectors(expression: Expr) -> Iterator[VectorSelector]:
    """The metrics that an expression reads."""
    match expression:
        case VectorSelector():
            yield expression
        case MatrixSelector():
            yield expression.vector_selector
        case BinaryExpr():
            yield from selectors(expression.lhs)
            yield from selectors(expression.rhs)
        case AggregateExpr() | ParenExpr() | UnaryExpr():
            yield from selectors(expression.expr)
        case Call():
            for each in expression.args:
                yield from selectors(each)
        case NumberLiteral():
            return
        case _:
            raise AssertionError(f"{type(expression)} is not followed here")


def documented() -> dict[str, tuple[str, set[str]]]:
    """The engine's gauges in docs/deployment.md: their label and its values."""
    rows = re.findall(r"^\| `((?:nv_trt_llm|trtforge)_\w+)` \| `(\w+)` \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    return {name: (label, set(re.findall(r"`(\w+)`", values))) for name, label, values in rows}


def expressions(found: dict[str, Object]) -> dict[str, str]:
    """Every expression, by where it stands."""
    rules = found["PrometheusRule"]["spec"]["groups"][0]["rules"]
    named = {f"alert {rule['alert']}": rule["expr"] for rule in rules}
    triggers = found["ScaledObject"]["spec"]["triggers"]
    named |= {f"trigger {number}": each["metadata"]["query"] for number, each in enumerate(triggers)}
    [text] = found["ConfigMap"]["data"].values()
    board = json.loads(text)
    for panel in board["panels"]:
        for target in panel["targets"]:
            replaced = target["expr"].replace("$__rate_interval", "1m")
            named[f"panel {panel['title']} {target['refId']}"] = replaced
    return named


@pytest.fixture(scope="module")
def found(one_rank: Path) -> dict[str, Object]:
    return objects(one_rank, max_replicas=3, namespace="serving")


def test_dashboards_of_two_deployments_are_two(one_rank: Path) -> None:
    """Grafana's sidecar keeps their files in one directory, and Grafana knows them by their uid."""
    files: dict[str, str] = {}
    for name in ("llama", "qwen"):
        files |= objects(one_rank, name=name)["ConfigMap"]["data"]
    assert set(files) == {"llama.json", "qwen.json"}
    assert {json.loads(text)["uid"] for text in files.values()} == {"llama", "qwen"}


def test_every_expression_reads_metrics_that_the_server_exports(found: dict[str, Object]) -> None:
    gauges = documented()
    named = expressions(found)
    assert len(named) > 20
    for where, text in named.items():
        read = list(selectors(promql_parser.parse(text)))
        assert read, where
        for selector in read:
            labels = {each.name: each.value for each in selector.matchers.matchers}
            if selector.name in gauges:
                label, values = gauges[selector.name]
                assert set(labels.get(label, next(iter(values))).split("|")) <= values, where
            else:
                assert selector.name in TRITON, where


def test_alerts_and_triggers_read_the_deployments_own_pods(found: dict[str, Object]) -> None:
    for where, text in expressions(found).items():
        for selector in selectors(promql_parser.parse(text)):
            labels = {each.name: each.value for each in selector.matchers.matchers}
            if not where.startswith("panel"):
                assert labels["namespace"] == "serving", where
                assert labels["app_kubernetes_io_instance"] == "llama", where
            else:
                assert labels["pod"] == "$pod", where
    assert found["PodMonitor"]["spec"]["podTargetLabels"] == ["app.kubernetes.io/instance"]


def test_scaling_follows_the_engines_requests_and_cache(found: dict[str, Object]) -> None:
    spec = found["ScaledObject"]["spec"]
    (full, waiting, cache) = (each["metadata"] for each in spec["triggers"])
    assert 'request_type="active"' in full["query"]
    assert full["threshold"] == FULLEST == "0.8"
    assert 'request_type="waiting"' in waiting["query"]
    assert waiting["threshold"] == "16", "a quarter of max_batch_size"
    assert 'kv_cache_block_type="fraction"' in cache["query"]
    for ratio in (full, cache):  # of a replica with two engines the fuller one counts
        assert ratio["query"].startswith("sum(max without (model, version) (")
    assert full["serverAddress"] == "http://prometheus-operated.monitoring.svc:9090"
    assert not any("queue" in each["metadata"]["query"] for each in spec["triggers"])


def test_the_monitor_scrapes_the_port_of_the_server(found: dict[str, Object]) -> None:
    (endpoint,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
    pod = found["Deployment"]["spec"]["template"]
    assert endpoint["port"] in {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert found["PodMonitor"]["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_ends_of_requests_are_counted_by_trtforges_engines_where_there_are_some(embedded: Path, one_rank: Path) -> None:
    """Triton counts a request as a success once trtforge's models take it."""
    own, tensorrt = (json.dumps(objects(each)["ConfigMap"]["data"]) for each in (embedded, one_rank))
    for names, there, absent in (
        ((metrics.ANSWERED_SECONDS, metrics.ENDS), own, tensorrt),
        ((metrics.SUCCESS, metrics.FAILURE, metrics.DURATION), tensorrt, own),
    ):
        for name in names:
            assert name.split("{")[0] in there
            assert name.split("{")[0] not in absent
    rules = objects(embedded)["PrometheusRule"]["spec"]["groups"][0]["rules"]
    fails = next(rule["expr"] for rule in rules if rule["alert"] == "TrtforgeRequestsFail")
    assert 'trtforge_requests{ended!~"answered|invalid",' in fails
    assert " or sum by (pod) (rate(nv_inference_request_failure" in fails
    assert ' and sum by (pod) (trtforge_requests{ended="answered",' in fails


def test_pauses_are_counted_since_the_start_by_trtforges_engines(embedded: Path, one_rank: Path) -> None:
    """TensorRT-LLM's backend reports those of the last iteration."""
    selector = 'nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="paused_requests",'
    for package, start, end in ((embedded, f"increase({selector}", "}[5m]) > 0"), (one_rank, selector, "} > 0")):
        rules = objects(package)["PrometheusRule"]["spec"]["groups"][0]["rules"]
        (alert,) = (rule for rule in rules if rule["alert"] == "TrtforgeRequestsPaused")
        assert alert["expr"].startswith(start)
        assert alert["expr"].endswith(end)
        assert alert["for"] == "10m"
        (board,) = objects(package)["ConfigMap"]["data"].values()
        (panel,) = (each for each in json.loads(board)["panels"] if each["title"].startswith("Paused"))
        assert panel["targets"][0]["expr"].startswith(f"sum({start}")


def test_running_requests_of_the_dashboard_do_not_wait(found: dict[str, Object]) -> None:
    running, waiting = (expressions(found)[f"panel Requests in the engine {name}"] for name in "AB")
    assert 'request_type="scheduled"' in running
    assert 'request_type="waiting"' in waiting


def test_panels_of_gpus_are_of_engines_on_gpus(embedded: Path, one_rank: Path) -> None:
    with_gpu, without = (json.dumps(objects(each)["ConfigMap"]["data"]) for each in (one_rank, embedded))
    assert metrics.GPU_USE in with_gpu
    assert metrics.GPU_USE not in without
