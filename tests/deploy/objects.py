"""Objects of a deployment, read back from its files and compared with the schemas of others."""

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

from trtforge.core.manifest import open_artifact
from trtforge.deploy.cluster import Cluster, plan_cluster
from trtforge.deploy.config import ClusterConfig
from trtforge.deploy.kubernetes import KUSTOMIZATION, manifests

Object = dict[str, Any]
_SCHEMAS = Path(__file__).parent / "schemas"


def cluster(repository: Path, **config: object) -> Cluster:
    """The deployment of a repository in the claim `models`."""
    volume = {} if "repository_image" in config else {"pvc": "models"}
    values = {"name": "llama", **volume, **config}
    return plan_cluster(open_artifact(repository, "repository"), ClusterConfig.parse(values, "test"))


def objects(repository: Path, **config: object) -> dict[str, Object]:
    """The objects of the plain manifests by kind and, where there are several, name."""
    return by_name(
        found
        for name, text in manifests(cluster(repository, **config)).items()
        if name.endswith(".yaml") and name != KUSTOMIZATION
        for found in yaml.safe_load_all(text)
    )


def by_name(found: Iterable[Object]) -> dict[str, Object]:
    """Objects by kind; a second one of a kind by kind and name."""
    result: dict[str, Object] = {}
    for each in found:
        kind = each["kind"]
        result[f"{kind} {each['metadata']['name']}" if kind in result else kind] = each
    return result


def pod_of(deployment: Object) -> Object:
    """The pod of a Deployment."""
    pod: Object = deployment["spec"]["template"]["spec"]
    return pod


def server_command(script: str) -> list[str]:
    """The words of the server's command in a container's script, as Kubernetes and Compose write it."""
    return shlex.split(script.replace("$$", "$").partition("exec ")[2].replace("\\\n", ""))


def faults(found: Object) -> list[str]:
    """What the schema of its kind does not allow in an object."""
    schema = json.loads((_SCHEMAS / "kubernetes.json").read_text())
    kind = schema["kinds"][f"{found['apiVersion']}/{found['kind']}"]
    return _faults({"$ref": f"#/definitions/{kind}", "definitions": schema["definitions"]}, found)


def compose_faults(found: Object) -> list[str]:
    """What the schema of Compose does not allow."""
    return _faults(json.loads((_SCHEMAS / "compose.json").read_text()), found)


def _faults(schema: Mapping[str, Any], found: Object) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft7Validator(schema).iter_errors(found)]
