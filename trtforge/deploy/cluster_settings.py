"""The settings of a deployment on Kubernetes: values of the chart, also used in the plain manifests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtforge.deploy.config import ClusterConfig
from trtforge.deploy.probes import PULL_SECONDS, startup_failures
from trtforge.deploy.values import Value
from trtforge.deploy.workload import Workload

_PROMETHEUS = "http://prometheus-operated.{namespace}.svc:9090"
_NAME = {"minLength": 1}
_COUNT = {"minimum": 1}
_MIB = 1 << 20
_CLIENTS = "Peers that may send requests; one at least, since Kubernetes takes an empty list for everyone."
OF_NAMESPACE = "kubernetes.io/metadata.name"
"""The label that Kubernetes gives every namespace."""


@dataclass(frozen=True)
class ClusterSettings:
    """The settings, each a Value; `name` and `namespace` are Helm's own."""

    name: Value
    namespace: Value
    image: Value
    pull_secrets: Value
    replicas: Value
    repository: Value
    sub_path: Value
    api_keys: Value
    ssh: Value
    resources: Value
    gpu_products: Value
    node_selector: Value
    tolerations: Value
    startup_failures: Value
    scaling: Value
    most_replicas: Value
    prometheus: Value
    monitoring: Value
    monitoring_namespace: Value
    monitoring_release: Value
    network_policy: Value
    clients: Value


def cluster_settings(config: ClusterConfig, workload: Workload) -> ClusterSettings:
    """The settings of one deployment."""
    claim, _, below = (config.pvc or "").partition("/")
    where = "OCI image" if config.repository_image else "PersistentVolumeClaim"
    monitored = config.monitoring != "none"
    waiting = PULL_SECONDS if config.nodes > 1 else 0  # a leader waits for the pods of other nodes
    namespace = config.monitoring if monitored else "monitoring"
    return ClusterSettings(
        name=Value("Release.Name", config.name, builtin=True),
        namespace=Value("Release.Namespace", config.namespace, builtin=True),
        image=Value("image", workload.image, "Image of the server.", _NAME),
        pull_secrets=Value(
            "imagePullSecrets",
            [{"name": config.pull_secret}] if config.pull_secret is not None else [],
            "Secrets for the image's registry: [{name: ...}].",
        ),
        replicas=Value("replicas", config.replicas, "Replicas, or the fewest with autoscaling.", _COUNT),
        repository=Value("repository.source", config.repository_image or claim, f"{where} with the repository.", _NAME),
        sub_path=Value("repository.subPath", below, "Directory of the claim that holds the repository."),
        api_keys=Value(
            "apiKeySecret", config.api_key_secret or "", "Secret whose key api-keys has a key a line.", _NAME
        ),
        ssh=Value("sshSecret", config.ssh_secret or "", "Secret of type kubernetes.io/ssh-auth.", _NAME),
        resources=Value("resources", _resources(config, workload), "Of each pod; GPUs are the ranks of a pod."),
        gpu_products=Value(
            "gpuProducts",
            [workload.gpu_product] if workload.gpu_product is not None else [],
            "Values of the node label nvidia.com/gpu.product that the engine runs on.",
        ),
        node_selector=Value("nodeSelector", {}, "More labels that nodes must have."),
        tolerations=Value("tolerations", _tolerations(workload), "Taints of nodes that are accepted."),
        startup_failures=Value(
            "startupFailureThreshold",
            startup_failures(workload.start_seconds + waiting),
            "Failures of the startup probe, every 10 s, before a pod that loads its engine is restarted.",
            _COUNT,
        ),
        scaling=Value("autoscaling.enabled", config.scales, "Add and remove replicas by load; needs KEDA."),
        most_replicas=Value(
            "autoscaling.maxReplicas", config.max_replicas or config.replicas, "Most replicas.", _COUNT
        ),
        prometheus=Value(
            "autoscaling.prometheus", _PROMETHEUS.format(namespace=namespace), "Address of Prometheus, which KEDA asks."
        ),
        monitoring=Value(
            "monitoring.enabled", monitored, "PodMonitor, alerts and dashboard; needs the Prometheus operator."
        ),
        monitoring_namespace=Value(
            "monitoring.namespace", namespace, "Namespace of Prometheus, which may scrape.", _NAME
        ),
        monitoring_release=Value(
            "monitoring.release",
            "",
            "Value of the label release by which Prometheus selects monitors and rules; empty: none.",
        ),
        network_policy=Value("networkPolicy.enabled", True, "Let only clients and Prometheus reach the pods."),
        clients=Value("networkPolicy.clients", _clients(config), _CLIENTS, {"minItems": 1}),
    )


def _resources(config: ClusterConfig, workload: Workload) -> Mapping[str, Any]:
    requests: dict[str, Any] = {"cpu": "4", "memory": f"{-(-workload.memory // _MIB)}Mi"}
    if not workload.gpus:
        return {"requests": requests}
    return {"requests": requests, "limits": {"nvidia.com/gpu": workload.gpus // config.nodes}}


def _clients(config: ClusterConfig) -> list[Mapping[str, Any]]:
    """Selectors of the pods in the deployment's own namespace and in the configured other ones."""
    others = ({"matchLabels": {OF_NAMESPACE: name}} for name in config.client_namespaces)
    return [{"podSelector": {}}, *({"namespaceSelector": selector} for selector in others)]


def _tolerations(workload: Workload) -> list[Mapping[str, str]]:
    return [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}] if workload.gpus else []
