"""Services, the NetworkPolicy, and the ServiceAccount of a deployment."""

from collections.abc import Mapping

from trtforge.deploy.cluster_settings import OF_NAMESPACE, ClusterSettings
from trtforge.deploy.pods import labels, metadata
from trtforge.deploy.values import Node, When
from trtforge.deploy.workload import Workload

LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
"""The label of a LeaderWorkerSet's leader pods, which clients reach."""
_H2C = "kubernetes.io/h2c"


def namespace(settings: ClusterSettings) -> Node:
    """The Namespace, which warns of pods with more privileges than these."""
    checked = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("audit", "warn")}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": settings.namespace, "labels": checked}}


def service_account(settings: ClusterSettings) -> Node:
    """The pods' account; they do not get its token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(settings),
        "automountServiceAccountToken": False,
    }


def service(workload: Workload, settings: ClusterSettings, nodes: int) -> Node:
    """The address of the replicas inside the cluster."""
    ports = [
        {
            "name": name,
            "port": port,
            "targetPort": name,
            **({"appProtocol": _H2C} if name == "grpc" else {}),
        }
        for name, port in workload.ports.items()
        if name != "metrics"
    ]
    selector = {**labels(settings), **(LEADER if nodes > 1 else {})}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(settings),
        "spec": {"type": "ClusterIP", "selector": selector, "ports": ports},
    }


def network_policy(workload: Workload, settings: ClusterSettings, nodes: int) -> Node:
    """The NetworkPolicy: clients reach the APIs, Prometheus the metrics; pods reach nothing, or one another if ranks
    are on several."""
    apis = [{"port": name} for name in workload.ports if name != "metrics"]
    prometheus = {"namespaceSelector": {"matchLabels": {OF_NAMESPACE: settings.monitoring_namespace}}}
    own: Mapping[str, Node] = {"podSelector": {"matchLabels": labels(settings)}}
    ingress: list[Node] = [
        {"from": settings.clients, "ports": apis},
        When(settings.monitoring, {"from": [prometheus], "ports": [{"port": "metrics"}]}),
    ]
    egress: list[Node] = []
    if nodes > 1:
        ingress.append({"from": [own]})
        names = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
        egress += [{"to": [own]}, {"ports": names}]  # a node-local DNS cache is in no namespace
    spec = {
        "podSelector": {"matchLabels": labels(settings)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(settings),
        "spec": spec,
    }
    return When(settings.network_policy, policy)
