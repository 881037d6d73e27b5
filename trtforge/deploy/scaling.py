"""Autoscaling by KEDA, and the PodDisruptionBudget."""

from trtforge.deploy import metrics
from trtforge.deploy.cluster_settings import ClusterSettings
from trtforge.deploy.metrics import of_pods
from trtforge.deploy.network import LEADER
from trtforge.deploy.pods import labels, metadata
from trtforge.deploy.values import Node, When

FULLEST, FULLEST_CACHE = "0.8", "0.85"
"""Averages per replica above which one is added: requests, those that wait included, as a share of the most that it
can run at once, and the share of the KV cache in use."""
_FULLEST_MODEL = "max without (model, version) "
"""Maximum over a replica's engines; it has two if one of them drafts."""
_CALM_SECONDS = 600  # before a replica is removed, as a new one would have to load the engine again


def scaled_object(settings: ClusterSettings, owner: Node, most_requests: int) -> Node:
    """Adds replicas if they are full, if requests wait, or if KV caches are full; the largest demand counts.

    Each query is a sum over the replicas, which KEDA divides by the threshold. `most_requests`: the most that a replica
    runs at once. As there is no fallback, the number of replicas stays while Prometheus does not answer.
    """
    sums = (
        (f"sum({_FULLEST_MODEL}({metrics.FULL}))", FULLEST),
        (f"sum({metrics.WAITING})", str(max(1, most_requests // 4))),
        (f"sum({_FULLEST_MODEL}({metrics.KV_FRACTION}))", FULLEST_CACHE),
    )
    triggers = [
        {
            "type": "prometheus",
            "metricType": "AverageValue",
            "metadata": {
                "serverAddress": settings.prometheus,
                "query": of_pods(query, settings.name, settings.namespace),
                "threshold": threshold,
            },
        }
        for query, threshold in sums
    ]
    behavior = {"scaleDown": {"stabilizationWindowSeconds": _CALM_SECONDS, "policies": [_one_at_a_time()]}}
    return When(
        settings.scaling,
        {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "ScaledObject",
            "metadata": metadata(settings),
            "spec": {
                "scaleTargetRef": owner,
                "minReplicaCount": settings.replicas,
                "maxReplicaCount": settings.most_replicas,
                "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
                "triggers": triggers,
            },
        },
    )


def disruption_budget(settings: ClusterSettings, nodes: int) -> Node:
    """Limits node drains to one ready replica at a time; replicas that are not ready are evicted at once."""
    selector = {**labels(settings), **(LEADER if nodes > 1 else {})}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(settings),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector},
        },
    }


def _one_at_a_time() -> Node:
    return {"type": "Pods", "value": 1, "periodSeconds": _CALM_SECONDS}
