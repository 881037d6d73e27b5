"""Plain manifests: a file for each kind of object, and the kustomization that names them."""

from trtforge.deploy.cluster import Cluster
from trtforge.deploy.values import When, as_yaml

KUSTOMIZATION = "kustomization.yaml"


def manifests(cluster: Cluster) -> dict[str, str]:
    """The files, in the order in which their objects are created."""
    files = {"namespace.yaml": as_yaml(cluster.namespace)}
    for name, objects in cluster.objects.items():
        there = [each for each in objects if not isinstance(each, When) or each.holds]
        if there:
            files[name] = "---\n".join(map(as_yaml, there))
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(files),
    }
    return {**files, KUSTOMIZATION: as_yaml(kustomization), **cluster.dockerfiles}
