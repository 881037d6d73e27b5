"""The objects for Prometheus and Grafana: the PodMonitor, alerts, and the dashboard."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from trtforge.deploy import metrics
from trtforge.deploy.cluster_settings import ClusterSettings
from trtforge.deploy.dashboard import dashboard
from trtforge.deploy.metrics import of_pods
from trtforge.deploy.pods import labels, metadata
from trtforge.deploy.values import Node, When, text

_TRITON_FAILED = f'sum by (pod) (rate({metrics.FAILURE}{{reason!="CANCELED",PODS}}[5m]))'
_TRITON_ALL = f"(sum by (pod) (rate({metrics.SUCCESS}{{PODS}}[5m])) + {_TRITON_FAILED})"
_ENGINE_FAILED = f"sum by (pod) (rate({metrics.SERVER_FAILED}[5m]))"
_KNOWN_ENDS = f"sum by (pod) ({metrics.ANSWERED})"  # repositories of trtforge before 0.2.2 have none
_ENGINE_ALL = f"sum by (pod) (rate({metrics.ENDS}[5m]))"
_OPERATOR = "monitoring.coreos.com/v1"


@dataclass(frozen=True)
class Alert:
    """An alert. `after`: how long the expression must be true; `says`: the problem; `do`: the advice."""

    name: str
    expression: str
    after: str
    severity: str
    says: str
    do: str


ALERTS = (
    Alert(
        "TrtforgeNoServer",
        f"absent({metrics.MOST_ACTIVE})",
        "5m",
        "critical",
        "No server reports its metrics.",
        "Look at the pods: `kubectl get pods` and the log of the one that does not become ready.",
    ),
    Alert(
        "TrtforgeEngineStalled",
        f"{metrics.ACTIVE} > 0 and ignoring (request_type, general_type) changes({metrics.ITERATIONS}[5m]) == 0",
        "5m",
        "critical",
        "{{ $labels.pod }} has running requests, and its engine has ended no iteration for 5 minutes.",
        "Delete the pod: the engine hangs, and Triton's liveness does not tell.",
    ),
    Alert(
        "TrtforgeRequestsFail",
        f"({_ENGINE_FAILED} / {_ENGINE_ALL} and {_KNOWN_ENDS} or {_TRITON_FAILED} / {_TRITON_ALL}) > 0.05",
        "10m",
        "warning",
        "{{ $labels.pod }} answers {{ $value | humanizePercentage }} of its requests with an error.",
        "Look at the server's log, and at what clients send.",
    ),
    Alert(
        "TrtforgeRequestsWait",
        f"{metrics.WAITING} > ignoring (request_type) {metrics.MOST_ACTIVE}",
        "5m",
        "warning",
        "{{ $labels.pod }} has more requests waiting than it runs at once.",
        "Add replicas, or raise max_batch_size if the KV cache has room.",
    ),
    Alert(
        "TrtforgeKvCacheFull",
        f"{metrics.KV_FRACTION} > 0.95",
        "10m",
        "warning",
        "{{ $labels.pod }} uses {{ $value | humanizePercentage }} of its KV cache.",
        "Add replicas, raise kv_cache_fraction, or quantise the KV cache.",
    ),
)
"""The same for all engines."""


def pod_monitor(settings: ClusterSettings) -> Node:
    """The PodMonitor, which scrapes pods with a metrics port: servers, not pods that only run ranks."""
    endpoint = {"port": "metrics", "path": "/metrics", "interval": "15s", "scrapeTimeout": "10s"}
    return When(
        settings.monitoring,
        {
            "apiVersion": _OPERATOR,
            "kind": "PodMonitor",
            "metadata": _labelled(settings),
            "spec": {
                "selector": {"matchLabels": labels(settings)},
                "podTargetLabels": [metrics.INSTANCE_LABEL],
                "podMetricsEndpoints": [endpoint],
            },
        },
    )


def prometheus_rule(settings: ClusterSettings, *, counted: bool) -> Node:
    """The alerts. `counted`: see `dashboard`."""
    rules = [_rule(alert, settings) for alert in (*ALERTS, _paused(counted=counted))]
    return When(
        settings.monitoring,
        {
            "apiVersion": _OPERATOR,
            "kind": "PrometheusRule",
            "metadata": _labelled(settings),
            "spec": {"groups": [{"name": "trtforge", "rules": rules}]},
        },
    )


def dashboard_map(settings: ClusterSettings, name: str, *, gpus: bool, counted: bool) -> Node:
    """The dashboard in a ConfigMap that Grafana's sidecar finds by its label; the sidecar keeps all files in one
    directory. `gpus`, `counted`: see `dashboard`."""
    found = metadata(settings, text(settings.name, "-dashboard"), {"grafana_dashboard": "1"})
    data = {f"{name}.json": json.dumps(dashboard(name, gpus=gpus, counted=counted), indent=1) + "\n"}
    return When(settings.monitoring, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": found, "data": data})


def _labelled(settings: ClusterSettings) -> Mapping[str, Node]:
    """Metadata with the label by which kube-prometheus-stack selects monitors and rules."""
    return metadata(settings, more={"release": When(settings.monitoring_release, settings.monitoring_release)})


def _paused(*, counted: bool) -> Alert:
    """TensorRT-LLM's backend reports the pauses of the last iteration, trtforge's engines all since the start."""
    return Alert(
        "TrtforgeRequestsPaused",
        f"increase({metrics.PAUSED}[5m]) > 0" if counted else f"{metrics.PAUSED} > 0",
        "10m",
        "warning",
        "{{ $labels.pod }} pauses running requests, which it computes again later.",
        "The KV cache is too small for this load: add replicas, or use the scheduler guaranteed_no_evict.",
    )


def _rule(alert: Alert, settings: ClusterSettings) -> Node:
    return {
        "alert": alert.name,
        "expr": of_pods(alert.expression, settings.name, settings.namespace),
        "for": alert.after,
        "labels": {"severity": alert.severity, "deployment": settings.name},
        "annotations": {"summary": alert.says, "description": alert.do},
    }
