"""Pods of a server, and the Deployment of those that fit on one node."""

from collections.abc import Mapping, Sequence
from typing import Any

from trtforge.deploy.cluster_settings import ClusterSettings
from trtforge.deploy.config import ClusterConfig
from trtforge.deploy.metrics import INSTANCE_LABEL
from trtforge.deploy.probes import (
    FAILURES,
    LIVE_PERIOD,
    PRE_STOP,
    PULL_SECONDS,
    READY_PERIOD,
    READY_TIMEOUT,
    STARTUP_PERIOD,
    http_probe,
)
from trtforge.deploy.values import Node, Value, When
from trtforge.deploy.workload import CACHE, KEY_FILE, SCRATCH, USER, Workload
from trtforge.launch.containers import SHARED_MEMORY_GIB

PODS = {"apiVersion": "apps/v1", "kind": "Deployment"}


def labels(settings: ClusterSettings) -> dict[str, Node]:
    """Labels of every object; pods are also selected by them."""
    return {"app.kubernetes.io/name": "triton", INSTANCE_LABEL: settings.name}


def metadata(settings: ClusterSettings, name: Node = None, more: Mapping[str, Node] | None = None) -> dict[str, Node]:
    """An object's metadata; `name`: if it differs from the deployment's."""
    return {
        "name": name if name is not None else settings.name,
        "namespace": settings.namespace,
        "labels": {**labels(settings), **(more or {})},
    }


def deployment(config: ClusterConfig, workload: Workload, settings: ClusterSettings) -> Node:
    """The Deployment. On GPUs an old pod ends before its successor starts, as there may be no spare GPU."""
    surge = {"maxSurge": 0, "maxUnavailable": 1} if workload.gpus else {"maxSurge": 1, "maxUnavailable": 0}
    container = server_container(config, workload, settings)
    return {
        **PODS,
        "metadata": metadata(settings),
        "spec": {
            "replicas": When(settings.scaling, settings.replicas, otherwise=True),
            "progressDeadlineSeconds": workload.start_seconds + PULL_SECONDS,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": surge},
            "selector": {"matchLabels": labels(settings)},
            "template": {
                "metadata": {"labels": labels(settings)},
                "spec": pod_spec(config, workload, settings, container),
            },
        },
    }


def server_container(config: ClusterConfig, workload: Workload, settings: ClusterSettings) -> dict[str, Node]:
    """The container that clients reach."""
    probes = workload.probes
    return {
        **base_container("server", config, workload, settings),
        "args": list(map(escaped, workload.command)),
        "env": environment(workload.environment),
        "ports": [{"name": name, "containerPort": port} for name, port in workload.ports.items()],
        "startupProbe": http_probe(probes.startup, STARTUP_PERIOD, settings.startup_failures),
        "livenessProbe": http_probe(probes.live, LIVE_PERIOD, FAILURES),
        "readinessProbe": {
            "exec": {"command": list(probes.ready)},
            "periodSeconds": READY_PERIOD,
            "timeoutSeconds": READY_TIMEOUT,
            "failureThreshold": FAILURES,
        },
        "lifecycle": {"preStop": {"exec": {"command": list(workload.drains or ("sleep", str(PRE_STOP)))}}},
    }


def base_container(name: str, config: ClusterConfig, workload: Workload, settings: ClusterSettings) -> dict[str, Node]:
    """The common part of a server's containers: image, GPUs, volumes, no privileges."""
    mounts: list[Node] = [
        {"name": "repository", "mountPath": workload.root, "readOnly": True, **_below(config, settings)},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "scratch", "mountPath": SCRATCH},
    ]
    if workload.embedded:
        mounts.append({"name": "cache", "mountPath": CACHE})
    if config.api_key_secret is not None:
        mounts.append({"name": "api-keys", "mountPath": str(KEY_FILE), "subPath": KEY_FILE.name, "readOnly": True})
    return {
        "name": name,
        "image": settings.image,
        "imagePullPolicy": "IfNotPresent",
        "resources": settings.resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def pod_spec(
    config: ClusterConfig,
    workload: Workload,
    settings: ClusterSettings,
    container: Node,
    more_volumes: Sequence[Node] = (),
) -> dict[str, Node]:
    """A pod's spec: scheduling, user and volumes."""
    source = (
        {"image": {"reference": settings.repository, "pullPolicy": "IfNotPresent"}}
        if config.repository_image
        else {"persistentVolumeClaim": {"claimName": settings.repository, "readOnly": True}}
    )
    volumes: list[Node] = [
        {"name": "repository", **source},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHARED_MEMORY_GIB}Gi"}},
        {"name": "scratch", "emptyDir": {}},
    ]
    if workload.embedded:
        volumes.append({"name": "cache", "emptyDir": {}})
    if config.api_key_secret is not None:
        volumes.append({"name": "api-keys", "secret": {"secretName": settings.api_keys, "defaultMode": 0o440}})
    return {
        "serviceAccountName": settings.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": PRE_STOP + workload.stop_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "imagePullSecrets": When(settings.pull_secrets, settings.pull_secrets),
        "nodeSelector": When(settings.node_selector, settings.node_selector),
        "affinity": When(settings.gpu_products, _affinity(settings.gpu_products)),
        "tolerations": When(settings.tolerations, settings.tolerations),
        "containers": [container],
        "volumes": [*volumes, *more_volumes],
    }


def environment(variables: Mapping[str, str]) -> list[Mapping[str, str]]:
    """Environment variables in the form of a container's spec, sorted by name."""
    return [{"name": name, "value": escaped(value)} for name, value in sorted(variables.items())]


def escaped(word: str) -> str:
    """A word of a command, escaped so that $(NAME) is not replaced and $$ is not shortened."""
    return word.replace("$", "$$")


def _below(config: ClusterConfig, settings: ClusterSettings) -> dict[str, Node]:
    return {} if config.repository_image else {"subPath": When(settings.sub_path, settings.sub_path)}


def _affinity(products: Value) -> Mapping[str, Any]:
    wanted = {"key": "nvidia.com/gpu.product", "operator": "In", "values": products}
    terms = [{"matchExpressions": [wanted]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
