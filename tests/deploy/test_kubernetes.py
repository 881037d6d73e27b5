"""Manifests: what Kubernetes and the operators accept, and what a server needs."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import tensorrt_repository
from tests.deploy.objects import cluster, faults, objects, pod_of, server_command
from tests.serve.test_launchers import RUNTIME, llmapi_repository, plan
from tests.serve.test_launchers import tensorrt_repository as serve_repository
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.manifest import open_artifact
from trtforge.deploy.kubernetes import KUSTOMIZATION, manifests
from trtforge.deploy.workload import plan_workload

SEVERAL: dict[str, Any] = {"nodes": 2, "ssh_secret": "ranks-key", "image": "registry.example/llama:1"}
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"max_replicas": 4, "replicas": 2},
    {"repository_image": "registry.example/models:1", "monitoring": "none"},
)


@pytest.mark.parametrize("config", CONFIGS, ids=("plain", "scaled", "image volume"))
@pytest.mark.parametrize("name", ["embedded", "one_rank", "four_ranks"])
def test_every_object_is_what_its_schema_allows(
    name: str, config: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    found = objects(request.getfixturevalue(name), **config)
    assert {kind: faults(each) for kind, each in found.items()} == {kind: [] for kind in found}
    expected = {"Namespace", "ServiceAccount", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    expected |= {"ScaledObject"} if "max_replicas" in config else set()
    expected |= set() if "monitoring" in config else {"PodMonitor", "PrometheusRule", "ConfigMap"}
    assert set(found) == expected


def test_the_schemas_refuse_what_is_wrong(one_rank: Path) -> None:
    found = objects(one_rank, max_replicas=2)
    found["Deployment"]["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    found["ScaledObject"]["spec"]["maxReplicas"] = 2
    found["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["interval"] = "soon"
    del found["PrometheusRule"]["spec"]["groups"][0]["name"]
    for kind in ("Deployment", "ScaledObject", "PodMonitor", "PrometheusRule"):
        assert len(faults(found[kind])) == 1, kind


def test_several_nodes_are_a_leader_worker_set(four_ranks: Path) -> None:
    found = objects(four_ranks, **SEVERAL, max_replicas=3)
    assert {kind: faults(each) for kind, each in found.items()} == {kind: [] for kind in found}
    group = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    assert found["LeaderWorkerSet"]["metadata"]["name"] == "llama-ranks"
    for template in ("leaderTemplate", "workerTemplate"):
        (container,) = group[template]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    startup = group["leaderTemplate"]["spec"]["containers"][0]["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] > 1800, "images of other nodes are pulled meanwhile"
    headless = found["Service llama-ranks"]["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    assert found["Service"]["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    assert found["NetworkPolicy"]["spec"]["egress"][1].keys() == {"ports"}, "a node's DNS cache is in no namespace"
    target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "llama-ranks"}
    assert found["ScaledObject"]["spec"]["scaleTargetRef"] == target


def test_the_leader_starts_the_ranks_that_serve_would_start(four_ranks: Path) -> None:
    group = objects(four_ranks, **SEVERAL)["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    command = server_command(group["leaderTemplate"]["spec"]["containers"][0]["args"][2])
    hosts = command.index("--host") + 1
    worker = "${LWS_LEADER_ADDRESS%%.*}-1.${LWS_LEADER_ADDRESS#*.}"
    assert command[hosts] == f"${{LWS_LEADER_ADDRESS}}:2,{worker}:2"
    served = plan(four_ranks, launcher="mpi", hosts=["a", "b"], host="0.0.0.0")
    ours, theirs = (" ".join(words).split(" : ") for words in (command, served.argv))
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        assert re.sub(r"prefix-name=\S+_(\d)_", r"\1", mine) == re.sub(r"prefix-name=\S+_(\d)_", r"\1", other)
    assert "--load-model=tensorrt_llm" in ours[1]
    assert [context.count("-x TRTFORGE_GRPC_URL") for context in ours] == [1, 1, 1, 1]


def test_the_server_has_the_command_and_environment_of_serve(one_rank: Path) -> None:
    (container,) = pod_of(objects(one_rank)["Deployment"])["containers"]
    launch = plan(one_rank, launcher="docker", host="0.0.0.0")
    assert launch.container is not None
    assert container["image"] == launch.container.image
    server = " ".join(launch.argv[launch.argv.index("tritonserver") :])
    server = server.replace(launch.secret, "${TRTFORGE_DOOR}").replace(f"{RUNTIME.name}_", "trtforge_")
    assert server_command(container["args"][2]) == server.split()
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment == {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", "TRTFORGE_GRPC_URL": "127.0.0.1:8001"}


def test_scripts_and_programs_parse(embedded: Path, one_rank: Path, four_ranks: Path) -> None:
    found = [
        objects(embedded, api_key_secret="keys")["Deployment"],
        objects(one_rank)["Deployment"],
        objects(four_ranks)["Deployment"],
        objects(four_ranks, **SEVERAL)["LeaderWorkerSet"],
    ]
    commands = [words for each in found for words in words_of(each) if words[1:2] == ["-c"]]
    programs = {"bash": 4, "sh": 1, "python3": 5}
    assert Counter(words[0] for words in commands) == programs
    for program, _, script in commands:
        if program == "python3":
            compile(script, program, "exec")
        else:
            subprocess.run([program, "-n"], input=script.replace("$$", "$"), text=True, check=True)


def words_of(found: Any) -> Iterator[list[str]]:
    """Every command and its arguments in an object."""
    for key, value in found.items() if isinstance(found, dict) else enumerate(found):
        if key in ("args", "command"):
            yield value
        elif isinstance(value, dict | list):
            yield from words_of(value)


def test_no_secret_is_written(embedded: Path, one_rank: Path, four_ranks: Path) -> None:
    for made in (cluster(embedded, api_key_secret="keys"), cluster(one_rank), cluster(four_ranks, **SEVERAL)):
        text = "".join(manifests(made).values())
        assert "kind: Secret" not in text
        doors = re.findall(r"trtforge-door=(\S+)", text)
        assert set(doors) <= {"$${TRTFORGE_DOOR}"}
    assert manifests(cluster(one_rank)) == manifests(cluster(one_rank))


@pytest.mark.parametrize("name", ["embedded", "one_rank", "four_ranks"])
def test_pods_have_no_rights(name: str, request: pytest.FixtureRequest) -> None:
    """The restricted level of Kubernetes' pod security standards."""
    found = objects(request.getfixturevalue(name))
    pod = pod_of(found["Deployment"])
    assert pod["automountServiceAccountToken"] is found["ServiceAccount"]["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {kind for volume in pod["volumes"] for kind in volume} == {"name", "emptyDir", "persistentVolumeClaim"}


def test_the_startup_probe_alone_ends_a_long_start(embedded: Path) -> None:
    (container,) = pod_of(objects(embedded)["Deployment"])["containers"]
    ready = container["args"][container["args"].index("--ready-timeout") + 1]
    assert int(ready) > 10 * container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"]


def test_probes_differ_and_startup_follows_from_the_engines_size(one_rank: Path) -> None:
    (container,) = pod_of(objects(one_rank)["Deployment"])["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert container["startupProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert "v2/models/ensemble/generate" in container["readinessProbe"]["exec"]["command"][2]
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 300
    manifest = open_artifact(one_rank, "repository")
    name = "tensorrt_llm/1/engine/rank0.engine"
    large = manifest.files[name].model_copy(update={"bytes": 40 * 10**9})
    grown = manifest.model_copy(update={"files": {**manifest.files, name: large}})
    small, slow = (plan_workload(each, image=None, drain_timeout=30, keys=False) for each in (manifest, grown))
    assert slow.start_seconds - small.start_seconds == pytest.approx(400, abs=2)


def test_pods_end_after_the_drain_timeout(one_rank: Path, four_ranks: Path) -> None:
    pod = pod_of(objects(one_rank, drain_timeout=90)["Deployment"])
    assert "--exit-timeout-secs=100" in pod["containers"][0]["args"][2]
    assert pod["terminationGracePeriodSeconds"] > 100
    (several,) = pod_of(objects(four_ranks, drain_timeout=90)["Deployment"])["containers"]
    waits = several["lifecycle"]["preStop"]["exec"]["command"]
    assert "nv_trt_llm_request_metrics" in waits[2], "mpirun kills its ranks a second after the signal"


def test_gpus_shared_memory_and_nodes_follow_from_the_engine(four_ranks: Path, embedded: Path) -> None:
    pod = pod_of(objects(four_ranks)["Deployment"])
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in pod["volumes"]
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    expected = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H100-80GB-HBM3"]}
    assert term["matchExpressions"] == [expected]
    on_cpu = pod_of(objects(embedded)["Deployment"])
    assert "limits" not in on_cpu["containers"][0]["resources"]
    assert not {"affinity", "tolerations"} & on_cpu.keys()


def test_the_repository_comes_from_a_claim_or_an_image(one_rank: Path) -> None:
    pod = pod_of(objects(one_rank, pvc="models/llama/8b")["Deployment"])
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    mount = {"name": "repository", "mountPath": "/models", "readOnly": True, "subPath": "llama/8b"}
    assert pod["containers"][0]["volumeMounts"][0] == mount
    image = pod_of(objects(one_rank, repository_image="registry.example/m:1")["Deployment"])
    assert image["volumes"][0]["image"] == {"reference": "registry.example/m:1", "pullPolicy": "IfNotPresent"}
    files = manifests(cluster(one_rank, repository_image="registry.example/m:1"))
    assert "COPY . /" in files["repository.Dockerfile"]
    with pytest.raises(UsageError, match="--pvc or --repository-image"):
        cluster(one_rank, pvc=None)
    with pytest.raises(UsageError, match="--pvc or --repository-image"):
        cluster(one_rank, pvc="m", repository_image="i")


def test_engine_is_mounted_where_it_was_packaged_for(tmp_path: Path) -> None:
    repository = tensorrt_repository(tmp_path, 1, serving_root="/srv/llm")
    (container,) = pod_of(objects(repository)["Deployment"])["containers"]
    assert container["volumeMounts"][0]["mountPath"] == "/srv/llm"
    assert "--model-repository=/srv/llm" in container["args"][2]


def test_keys_come_from_a_secret_and_close_grpc(embedded: Path) -> None:
    found = objects(embedded, api_key_secret="llama-keys")
    pod = pod_of(found["Deployment"])
    assert {"name": "api-keys", "secret": {"secretName": "llama-keys", "defaultMode": 0o440}} in pod["volumes"]
    (container,) = pod["containers"]
    assert container["args"][-2:] == ["--api-key-file", "/run/secrets/api-keys"]
    assert {port["name"] for port in container["ports"]} == {"http", "metrics", "openai"}
    (thinking,) = pod_of(objects(embedded, reasoning_parser="deepseek-r1")["Deployment"])["containers"]
    assert thinking["args"][-2:] == ["--reasoning-parser", "deepseek-r1"]
    assert "TRTFORGE_API_KEY=$(grep" in container["readinessProbe"]["exec"]["command"][2]
    assert faults(found["Deployment"]) == []


def test_clients_and_prometheus_alone_reach_the_pods(one_rank: Path) -> None:
    found = objects(one_rank, monitoring="observability", client_namespaces=["ingress", "apps"])["NetworkPolicy"]
    assert faults(found) == []
    spec = found["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["egress"] == []
    apis, metrics = spec["ingress"]
    assert [port["port"] for port in apis["ports"]] == ["http", "grpc"]
    own, *others = apis["from"]
    assert own == {"podSelector": {}}
    named = [each["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for each in others]
    assert named == ["ingress", "apps"]
    assert metrics["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "observability"}


def test_autoscaling_leaves_the_replicas_to_keda(one_rank: Path) -> None:
    assert objects(one_rank, replicas=2)["Deployment"]["spec"]["replicas"] == 2
    scaled = objects(one_rank, replicas=2, max_replicas=6)
    assert "replicas" not in scaled["Deployment"]["spec"]
    spec = scaled["ScaledObject"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 6)
    assert "fallback" not in spec, "replicas stay while Prometheus does not answer"
    with pytest.raises(UsageError, match=r"--max-replicas 1 is less than --replicas 2"):
        objects(one_rank, replicas=2, max_replicas=1)


def test_drained_nodes_take_one_replica_that_serves_at_a_time(one_rank: Path) -> None:
    spec = objects(one_rank)["PodDisruptionBudget"]["spec"]
    assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def test_kustomization_names_every_file(one_rank: Path) -> None:
    files = manifests(cluster(one_rank))
    assert yaml.safe_load(files[KUSTOMIZATION])["resources"] == [name for name in files if name != KUSTOMIZATION]


def test_what_cannot_be_deployed_is_said(embedded: Path, one_rank: Path, four_ranks: Path, tmp_path: Path) -> None:
    refusals: tuple[tuple[Path, dict[str, Any], str], ...] = (
        (embedded, SEVERAL, "--nodes 2: an engine of backend torch runs on one node"),
        (four_ranks, SEVERAL | {"nodes": 3}, "4 ranks cannot be divided over 3 nodes"),
        (one_rank, SEVERAL, "1 ranks cannot be divided over 2 nodes"),
        (four_ranks, {"nodes": 2}, "--nodes 2 needs --ssh-secret"),
        (four_ranks, {"nodes": 2, "ssh_secret": "s"}, "--nodes 2 needs --image"),
        (four_ranks, {"ssh_secret": "s"}, "--ssh-secret applies only to several nodes"),
        (one_rank, {"api_key_secret": "keys"}, "NVIDIA's image runs Triton's own, which checks none"),
        (llmapi_repository(tmp_path / "new", "1.3.0"), {}, r"no known container has TensorRT-LLM 1\.3\.0"),
        (llmapi_repository(tmp_path / "api", "1.2.1", tp=2), SEVERAL, "--nodes 2: an engine of backend llmapi"),
    )
    for repository, config, said in refusals:
        with pytest.raises(ForgeError, match=said) as caught:
            cluster(repository, **config)
        assert caught.value.hint, said
    made = cluster(tmp_path / "new" / "repository", image="registry.example/triton-trtllm:1.3.0")
    assert "exec tritonserver" in made.workload.command[2]


def test_what_serve_warns_of_is_said(tmp_path: Path) -> None:
    old = serve_repository(tmp_path, version="0.17.0.post1")
    unknown, holes = cluster(old).workload.warnings
    assert unknown.startswith("the engine does not record its TensorRT and SM")
    assert holes.startswith("Triton 25.02 has known vulnerabilities that clients can reach (")
    assert cluster(old, image="registry.example/triton:1").workload.warnings == ()


def test_an_image_of_another_release_is_refused(one_rank: Path) -> None:
    other = "nvcr.io/nvidia/tritonserver:26.02-trtllm-python-py3"
    with pytest.raises(ForgeError, match=f"built with TensorRT-LLM 1.2.1, the image {other} has TensorRT-LLM 1.1.0"):
        cluster(one_rank, image=other)
