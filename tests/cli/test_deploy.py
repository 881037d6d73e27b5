"""`trtforge deploy`: each option does something, the output place is kept as other commands keep theirs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import DEMO_MODEL
from tests.deploy.conftest import tensorrt_repository
from tests.package.engines import torch_engine
from tests.serve.test_launchers import llmapi_repository
from trtforge import __version__
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package

CLUSTER = ("--pvc", "models")
NODES = ("--nodes", "2", "--ssh-secret", "ranks", "--image", "registry.example/ranks:1")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tensorrt_repository(tmp_path_factory.mktemp("llama-8b"), 4)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("Demo 4")
    return package(PackageConfig(), torch_engine(place / "engine"), DEMO_MODEL, place / "repository").path


def planned(run: Any, *words: str | Path) -> dict[str, Any]:
    """The object of --dry-run --json."""
    status, out, err = run("deploy", *words, "--dry-run", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def test_manifests_are_written_once_and_kept(run: Any, four_ranks: Path, tmp_path: Path) -> None:
    words = ("deploy", "kubernetes", four_ranks, tmp_path / "out", *CLUSTER)
    status, out, err = run(*words)
    assert (status, err) == (0, "")
    assert "image: nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3\n" in out
    assert f"next: kubectl apply --kustomize {tmp_path / 'out'}\n" in out
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {"deployment.yaml", "kustomization.yaml", "forge.json"} < before.keys()
    assert json.loads(run(*words, "--json")[1])["cached"] is True
    assert json.loads(run(*words, "--force", "--json")[1])["cached"] is False
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "out" / "service.yaml").unlink()
    assert json.loads(run(*words, "--replicas", "2", "--json")[1])["replaced"] is not None


def test_files_that_were_changed_are_kept(run: Any, four_ranks: Path, tmp_path: Path) -> None:
    words = ("deploy", "kubernetes", four_ranks, tmp_path / "out", *CLUSTER)
    run(*words)
    service = tmp_path / "out" / "service.yaml"
    written = service.read_text()
    service.write_text("kind: Service\n")
    for options in ((), ("--replicas", "2")):
        status, _, err = run(*words, *options)
        assert (status, service.read_text()) == (1, "kind: Service\n")
        assert f"error: {service} was changed after it was written\n" in err
        assert "replace it with --force" in err
    assert run(*words, "--force")[0] == 0
    assert service.read_text() == written


def test_files_of_others_are_kept(run: Any, four_ranks: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "values.yaml").write_text("mine: 1\n")
    status, _, err = run("deploy", "helm", four_ranks, tmp_path / "out", *CLUSTER, "--force")
    assert status == 1
    assert "has files that trtforge did not write (values.yaml)" in err
    assert (tmp_path / "out" / "values.yaml").read_text() == "mine: 1\n"
    status, _, err = run("deploy", "helm", four_ranks, four_ranks / "chart", *CLUSTER)
    assert (status, "is inside of the repository" in err) == (1, True)


def test_a_dry_run_writes_nothing_and_prints_what_kubectl_takes(run: Any, four_ranks: Path, tmp_path: Path) -> None:
    status, out, _ = run("deploy", "kubernetes", four_ranks, tmp_path / "out", *CLUSTER, "--dry-run")
    assert status == 0
    kinds = [each["kind"] for each in yaml.safe_load_all(out)]
    assert kinds[:3] == ["Namespace", "ServiceAccount", "Deployment"]
    assert "Kustomization" not in kinds
    assert not (tmp_path / "out").exists()
    assert "# Chart.yaml\n" in run("deploy", "helm", four_ranks, tmp_path / "out", *CLUSTER, "--dry-run")[1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["kubernetes", "helm"])
def test_each_option_changes_the_files(run: Any, four_ranks: Path, tmp_path: Path, target: str) -> None:
    options = (
        ("--name", "other"),
        ("--image", "registry.example/triton:1"),
        ("--pull-secret", "registry"),
        ("--drain-timeout", "120"),
        ("--namespace", "serving"),
        ("--pvc", "others/llama"),
        ("--client-namespace", "ingress-nginx"),
        ("--monitoring", "none"),
        ("--monitoring", "observability"),
        ("--replicas", "2"),
        ("--max-replicas", "3"),
        NODES,
    )
    words = (target, four_ranks, tmp_path / "out", *CLUSTER)
    before = planned(run, *words)
    for option in options:
        after = planned(run, *words, *option)
        if (target, option[0]) == ("helm", "--namespace"):  # a chart has no namespace of its own
            assert "--namespace serving --create-namespace" in after["next"]
        else:
            assert before["files"] != after["files"], option


def test_each_option_changes_compose(run: Any, embedded: Path, tmp_path: Path) -> None:
    options = (
        ("--name", "other"),
        ("--image", "registry.example/trtforge:1"),
        ("--drain-timeout", "120"),
        ("--host", "192.0.2.1"),
        ("--http-port", "9100"),
        ("--grpc-port", "9101"),
        ("--metrics-port", "9102"),
        ("--openai-port", "9103"),
        ("--api-key-file", "keys"),
    )
    before = planned(run, "compose", embedded, tmp_path / "out")["files"]["compose.yaml"]
    for option in options:
        after = planned(run, "compose", embedded, tmp_path / "out", *option)["files"]["compose.yaml"]
        assert option[1] in after
        assert option[1] not in before


def test_names_follow_from_the_build(run: Any, embedded: Path, four_ranks: Path, tmp_path: Path) -> None:
    assert planned(run, "compose", embedded, tmp_path / "out")["name"].startswith("demo-4")
    assert planned(run, "kubernetes", four_ranks.parent, tmp_path / "out", *CLUSTER)["name"].startswith("llama-8b")


def test_images_that_nobody_publishes_are_built_first(
    run: Any, embedded: Path, four_ranks: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    compose = planned(run, "compose", embedded, out)
    build = f"docker build --tag trtforge-serve:{__version__} --build-context wheel=DIRECTORY {out}"
    assert compose["next"] == f"{build} && docker compose --file {out}/compose.yaml up --detach"
    local, own = (
        planned(run, "kubernetes", embedded, out, *CLUSTER, *words)["next"]
        for words in ((), ("--image", "registry.example/serve:1"))
    )
    assert local == f"{build} && kubectl apply --kustomize {out}", "that name has no registry to push to"
    assert "docker push registry.example/serve:1 && " in own
    said = run("deploy", "helm", embedded, out, *CLUSTER, "--dry-run")[2]
    assert f"trtforge-serve:{__version__} is in no registry: name one with --image REGISTRY/NAME" in said
    several = planned(run, "kubernetes", four_ranks, out, *CLUSTER, *NODES)
    image = "registry.example/ranks:1"
    expected = f"docker build --tag {image} {out} && docker push {image} && kubectl apply --kustomize {out}"
    assert several["next"] == expected
    assert "openssh-server" in several["files"]["Dockerfile"]
    printed = run("deploy", "kubernetes", four_ranks, out, *CLUSTER, *NODES, "--dry-run")[1]
    assert "\n# FROM nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3\n" in printed
    assert all(yaml.safe_load_all(printed)), "comments to YAML"
    written = run("deploy", "compose", embedded, out)[1]
    assert f"wheel: DIRECTORY holds trtforge-{__version__}-py3-none-any.whl, from `pip wheel" in written
    volume = planned(run, "helm", four_ranks, out, "--repository-image", "registry.example/models:1")
    assert f"docker build --tag registry.example/models:1 --file {out}/repository.Dockerfile" in volume["next"]
    assert " && helm upgrade --install " in volume["next"]
    digest = f"registry.example:5000/a/models@sha256:{'0a' * 32}"  # what exists is neither built nor pushed
    there = planned(run, "helm", four_ranks, out, "--repository-image", digest)
    assert there["next"].startswith("helm upgrade --install ")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("kubernetes",), 2, "--pvc or --repository-image"),
        (
            ("kubernetes", *CLUSTER, "--name", "Llama"),
            2,
            "'Llama' is not a name of at most 40 lower-case letters",
        ),
        (("kubernetes", *CLUSTER, "--replicas", "0"), 2, "--replicas"),
        (("helm", *CLUSTER, "--replicas", "3", "--max-replicas", "2"), 2, "--max-replicas 2 is less than --replicas 3"),
        (("helm", *CLUSTER, "--max-replicas", "2", "--monitoring", "none"), 2, "--max-replicas needs --monitoring"),
        (("helm", *CLUSTER, "--client-namespace", "a", "--client-namespace", "B"), 2, "--client-namespace"),
        (("helm", *CLUSTER, "--image", "Foo/Bar:latest"), 2, "'Foo/Bar:latest' is not an image"),
        (("helm", *CLUSTER, "--image", "x@sha256:abc"), 2, "'x@sha256:abc' is not an image"),
        (("helm", "--pvc", "models."), 2, "'models.' is not NAME or NAME/DIRECTORY"),
        (("helm", *CLUSTER, "--pull-secret", "a..b"), 2, "'a..b' is not a name"),
        (("helm", "--pvc", "models/../other"), 2, "'models/../other' is not NAME or NAME/DIRECTORY"),
        (("helm", *CLUSTER, "--api-key-secret", "keys"), 1, "which checks none"),
        (("compose", "--openai-port", "8003"), 1, "OpenAI's API is a part of trtforge"),
        (("compose", "--reasoning-parser", "qwen3"), 1, "--backend HOST:PORT --reasoning-parser qwen3` with"),
        (("helm", *CLUSTER, "--reasoning-parser", "qwen3"), 1, "hint: Leave --reasoning-parser out, and run"),
        (("compose", "--reasoning-parser", "r1"), 2, "--reasoning-parser"),
        (("compose", "--host", "localhost"), 2, "'localhost' is not an IP address"),
        (("compose", "--nodes", "2"), 2, "No such option: --nodes"),
    ],
)
def test_what_cannot_be_is_said(
    run: Any, four_ranks: Path, tmp_path: Path, words: tuple[str, ...], status: int, said: str
) -> None:
    target, *options = words
    got, _, err = run("deploy", target, four_ranks, tmp_path / "out", *options)
    assert got == status
    assert said in err
    assert "hint:" in err
    assert not (tmp_path / "out").exists()


def test_the_llm_api_runs_one_server_with_all_gpus(run: Any, tmp_path: Path) -> None:
    repository = llmapi_repository(tmp_path, "1.2.1", tp=2)
    found = planned(run, "kubernetes", repository, tmp_path / "out", *CLUSTER)
    assert found["gpus"] == 2
    (pod,) = (
        each["spec"]["template"]["spec"]
        for each in yaml.safe_load_all(found["files"]["deployment.yaml"])
        if each["kind"] == "Deployment"
    )
    assert "mpirun" not in pod["containers"][0]["args"][2]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 2}
