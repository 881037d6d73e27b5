"""The chart: rendered by Go's template language, it holds the objects of the plain manifests."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from tests.deploy.objects import by_name, cluster, faults, objects
from tests.deploy.test_kubernetes import CONFIGS, SEVERAL
from trtforge.deploy.chart import chart
from trtforge.deploy.cluster import Cluster

Object = dict[str, Any]


def rendered(made: Cluster, **changed: object) -> dict[str, Object]:
    """The objects that Helm would send, with these values changed (dotted keys, the dots as underscores)."""
    files = chart(made)
    values = yaml.safe_load(files["values.yaml"])
    for name, value in changed.items():
        place = values
        *above, last = name.split("__")
        for each in above:
            place = place[each]
        assert last in place, f"the chart has no value {name}"
        place[last] = value
    assert faults_of_values(files, values) == []
    return by_name(objects_of(files, values, made.config.name, made.config.namespace))


def objects_of(files: dict[str, str], values: Object, name: str, namespace: str) -> list[Object]:
    """The objects of a release. Raises ValueError with the message of `fail`."""
    gotpl = pytest.importorskip("gotpl", reason="gotpl needs Python 3.11")

    def fail(message: str) -> str:
        raise ValueError(message)

    def matches(pattern: str, text: str) -> bool:
        return re.search(pattern, text) is not None

    release = {"Name": name, "Namespace": namespace}
    functions = {"toJson": json.dumps, "int64": int, "regexMatch": matches, "fail": fail}
    texts = [
        gotpl.Template(text, functions=functions).render({"Values": values, "Release": release})
        for name, text in files.items()
        if name.startswith("templates/") and name.endswith(".yaml")
    ]
    return [found for text in texts for found in yaml.safe_load_all(text) if found is not None]


def faults_of_values(files: dict[str, str], values: Object) -> list[str]:
    schema = json.loads(files["values.schema.json"])
    Draft7Validator.check_schema(schema)
    return [f"{error.json_path}: {error.message}" for error in Draft7Validator(schema).iter_errors(values)]


@pytest.mark.parametrize("config", CONFIGS, ids=("plain", "scaled", "image volume"))
@pytest.mark.parametrize("name", ["embedded", "one_rank", "four_ranks"])
def test_the_chart_renders_the_plain_manifests(
    name: str, config: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    repository = request.getfixturevalue(name)
    plain = objects(repository, **config)
    assert rendered(cluster(repository, **config)) == {key: each for key, each in plain.items() if key != "Namespace"}


def test_several_nodes_and_keys_are_the_same_too(four_ranks: Path, embedded: Path) -> None:
    for repository, config in ((four_ranks, SEVERAL), (embedded, {"api_key_secret": "keys"})):
        plain = objects(repository, **config)
        assert rendered(cluster(repository, **config)) == {
            key: each for key, each in plain.items() if key != "Namespace"
        }


def test_values_change_what_they_say(one_rank: Path) -> None:
    made = cluster(one_rank)
    found = rendered(
        made,
        image="registry.example/triton:2",
        imagePullSecrets=[{"name": "pull"}],
        nodeSelector={"zone": "a"},
        gpuProducts=[],
        replicas=3,
        repository__subPath="llama",
        startupFailureThreshold=90,
        monitoring__enabled=True,
        monitoring__release="prometheus",
        networkPolicy__enabled=False,
    )
    pod = found["Deployment"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "registry.example/triton:2"
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["nodeSelector"] == {"zone": "a"}
    assert "affinity" not in pod
    assert found["Deployment"]["spec"]["replicas"] == 3
    assert pod["containers"][0]["volumeMounts"][0]["subPath"] == "llama"
    assert pod["containers"][0]["startupProbe"]["failureThreshold"] == 90
    assert found["PodMonitor"]["metadata"]["labels"]["release"] == "prometheus"
    assert "NetworkPolicy" not in found
    assert {kind: faults(each) for kind, each in found.items()} == {kind: [] for kind in found}


def test_autoscaling_and_monitoring_are_switched_by_values(one_rank: Path) -> None:
    made = cluster(one_rank, monitoring="none")
    assert not {"PodMonitor", "PrometheusRule", "ConfigMap", "ScaledObject"} & rendered(made).keys()
    found = rendered(made, monitoring__enabled=True, autoscaling__enabled=True, autoscaling__maxReplicas=5)
    assert {"PodMonitor", "PrometheusRule", "ConfigMap"} < found.keys()
    assert found["ScaledObject"]["spec"]["maxReplicaCount"] == 5
    assert "replicas" not in found["Deployment"]["spec"]
    assert {kind: faults(each) for kind, each in found.items()} == {kind: [] for kind in found}


def test_the_values_schema_refuses_what_the_chart_does_not_know(one_rank: Path) -> None:
    files = chart(cluster(one_rank))
    values = yaml.safe_load(files["values.yaml"])
    assert faults_of_values(files, values) == []
    wrong = values | {"replica": 2, "image": "", "replicas": "two"}
    wrong["monitoring"] = values["monitoring"] | {"enabled": "yes"}
    wrong["networkPolicy"] = values["networkPolicy"] | {"clients": []}  # for Kubernetes everyone
    assert len(faults_of_values(files, wrong)) == 5
    removed = values | {"networkPolicy": {"enabled": True}}  # by null; it would admit everyone
    assert faults_of_values(files, removed) == ["$.networkPolicy: 'clients' is a required property"]
    assert faults_of_values(files, {name: each for name, each in values.items() if name != "resources"}) == []


@pytest.mark.parametrize("group", ["autoscaling", "monitoring", "networkPolicy", "repository"])
def test_a_group_of_values_cannot_be_removed(group: str, one_rank: Path) -> None:
    files = chart(cluster(one_rank))
    values = yaml.safe_load(files["values.yaml"])
    del values[group]  # as `--set GROUP=null` does; templates that read it would fail with a nil pointer
    assert faults_of_values(files, values) == [f"$: {group!r} is a required property"]


def test_a_name_of_a_release_is_checked(one_rank: Path, four_ranks: Path) -> None:
    form = "lower-case letters, digits and hyphens, a letter first"
    for repository, config, most in ((one_rank, {}, 53), (four_ranks, SEVERAL, 40)):
        files = chart(cluster(repository, **config))
        values = yaml.safe_load(files["values.yaml"])
        found = objects_of(files, values, "n" * most, "serving")
        assert {each["metadata"]["namespace"] for each in found} == {"serving"}
        for name in ("n" * (most + 1), "1model", "my.model", "model-"):
            with pytest.raises(Exception, match=f"at most {most} {form}"):
                objects_of(files, values, name, "serving")


def test_the_chart_is_whole(one_rank: Path, four_ranks: Path, embedded: Path) -> None:
    files = chart(cluster(one_rank))
    about = yaml.safe_load(files["Chart.yaml"])
    assert (about["apiVersion"], about["name"], about["appVersion"]) == ("v2", "llama", "1.2.1")
    assert "forge.json" in files[".helmignore"].split()
    assert "rollout status deployment/{{ .Release.Name }}" in files["templates/NOTES.txt"]
    assert "v2/models/ensemble/generate" in files["templates/NOTES.txt"]
    assert "Authorization" not in files["templates/NOTES.txt"]
    keyed = chart(cluster(embedded, api_key_secret="keys"))["templates/NOTES.txt"]
    assert '/generate -H "Authorization: Bearer $TRTFORGE_API_KEY" -d' in keyed
    several = chart(cluster(four_ranks, **SEVERAL))["templates/NOTES.txt"]
    assert "wait --for=condition=Available --timeout=1h leaderworkerset/{{ .Release.Name }}-ranks\n" in several
