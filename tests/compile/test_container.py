"""Ranks in containers, with a stand-in for docker that runs them here."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.compile.checkpoints import engine
from tests.compile.trtllm import Trtllm, write_checkpoint
from trtforge.compile.machine import Machine
from trtforge.compile.stage import CompileOptions, compile_engine, plan_engine
from trtforge.core.artifact import Produced
from trtforge.core.errors import ForgeError, LoggedError

DOCKER = Machine(gpu=True, docker=True)
IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"


@pytest.fixture(autouse=True)
def _docker_on_path(trtllm: Trtllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{trtllm.site}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONPATH")


def build(tmp_path: Path, *, container: str | None = None, workers: int = 1, **rest: Any) -> Produced:
    return compile_engine(
        engine(backend="tensorrt_llm", max_batch_size=8),
        tmp_path / "checkpoint",
        tmp_path / "engine",
        CompileOptions(workers=workers, container=container),
        machine=DOCKER,
        **rest,
    )


def docker_calls(trtllm: Trtllm) -> list[list[str]]:
    return [json.loads(line) for line in (trtllm.site / "docker.jsonl").read_text().splitlines()]


def option(call: list[str], name: str) -> str:
    return call[call.index(name) + 1]


def without_token(call: list[str]) -> list[str]:
    """The command with the random end of the container's name left out."""
    return [re.sub(r"^(trtforge-[0-9a-f]{12}-rank\d+)-[0-9a-f]{8}$", r"\1", word) for word in call]


def test_ranks_are_built_in_the_image_of_the_release(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    made = build(tmp_path, workers=2)
    assert sorted(made.manifest.files) == [
        "config.json",
        "rank0.engine",
        "rank1.engine",
        "tokenizer/tokenizer.json",
    ]
    assert made.manifest.identity.versions["tensorrt"] == "10.14.1.48"
    target, *ranks = docker_calls(trtllm)
    assert option(target, "--gpus") == "all"
    assert target[-3:] == ["python3", "/opt/trtforge/rank.py", "target"]
    assert sorted(option(call, "--gpus") for call in ranks) == ["device=0", "device=1"]
    for call in (target, *ranks):
        assert call[:2] == ["run", "--rm"]
        assert IMAGE in call
        assert option(call, "--user") == f"{os.getuid()}:{os.getgid()}"
    assert len({option(call, "--name") for call in (target, *ranks)}) == 3


def test_the_dry_run_prints_what_is_run(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    plan = plan_engine(
        engine(backend="tensorrt_llm", max_batch_size=8),
        tmp_path / "checkpoint",
        tmp_path / "engine",
        CompileOptions(),
        machine=DOCKER,
    ).as_json()
    assert plan["place"] == f"a container of {IMAGE}"
    build(tmp_path)
    _, *ranks = docker_calls(trtllm)
    ran = [["docker", *call] for call in ranks]
    assert [without_token(call) for call in ran] == [without_token(run["command"]) for run in plan["runs"]]
    given = [call["build_config"] for call in trtllm.calls("build")]
    assert given == [plan["build_config"]] * 2


def test_the_image_can_be_named(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    build(tmp_path, container="registry.example/trtllm:mine")
    assert all("registry.example/trtllm:mine" in call for call in docker_calls(trtllm))


def test_chosen_gpus_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trtllm: Trtllm) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    build(tmp_path, workers=2)
    target, *ranks = docker_calls(trtllm)
    assert option(target, "--gpus") == '"device=1,0"'
    assert {call["rank"]: call["gpu"] for call in trtllm.calls("build")} == {0: "1", 1: "0"}
    assert len(ranks) == 2


def test_a_rank_that_fails_ends_the_containers_of_the_others(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    trtllm.behaves(waits_for={"0": "never", "1": "begun-0"}, fails={"1": "Required but not provided tensors:{'a'}"})
    with pytest.raises(LoggedError, match="rank 1 ended with status 1") as caught:
        build(tmp_path, workers=2)
    assert "Required but not provided tensors" in caught.value.log.read_text()
    *runs, first, second = docker_calls(trtllm)
    names = sorted(option(call, "--name") for call in runs if "-rank" in option(call, "--name"))
    assert sorted([first, second]) == [["rm", "--force", name] for name in names]
    for call in trtllm.calls("build"):
        assert not Path(f"/proc/{call['pid']}").exists()


def test_a_container_that_was_left_is_neither_in_the_way_nor_removed(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    trtllm.behaves(fails={"0": "out of luck"})
    for _ in range(2):
        with pytest.raises(LoggedError):
            build(tmp_path)
    calls = docker_calls(trtllm)
    first, second = (option(call, "--name") for call in calls if call[0] == "run" and call[-1] != "target")
    assert without_token([first]) == without_token([second])
    assert first != second
    assert [call for call in calls if call[0] == "rm"] == [["rm", "--force", first], ["rm", "--force", second]]


def test_docker_that_refuses(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    (trtllm.site / "docker-refuses").write_text('could not select device driver "" with capabilities: [[gpu]].')
    with pytest.raises(LoggedError, match="the query for versions and GPUs ended with status 1") as caught:
        build(tmp_path)
    assert caught.value.log.read_text().startswith("docker: Error response from daemon: could not select device driver")


def test_an_image_that_says_nothing(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    (trtllm.site / "tensorrt.py").write_text("import sys\nprint('{nothing')\nsys.exit(0)\n")
    with pytest.raises(LoggedError, match="did not report its versions and GPUs") as caught:
        build(tmp_path)
    assert caught.value.log == tmp_path / "engine.logs/target.log"
    assert "=== Triton Inference Server ===" in caught.value.log.read_text()


def test_an_image_of_another_release(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    Trtllm.install(trtllm.site, "1.1.0")
    with pytest.raises(
        ForgeError, match=rf"a container of {IMAGE} has TensorRT-LLM 1\.1\.0, the engine is for 1\.2\.1"
    ) as caught:
        build(tmp_path)
    assert "--container IMAGE" in caught.value.hint


def test_a_comma_in_a_path(tmp_path: Path, trtllm: Trtllm) -> None:
    checkpoint = write_checkpoint(tmp_path / "check,point")
    with pytest.raises(ForgeError, match="cannot mount a path with a comma"):
        compile_engine(
            engine(backend="tensorrt_llm"), checkpoint, tmp_path / "engine", CompileOptions(), machine=DOCKER
        )
