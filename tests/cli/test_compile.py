"""`trtforge compile` and `build` with TensorRT-LLM's stand-in: statuses, messages, signals.

The program's only stranger is the machine: the test says that there is a GPU.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.compile.trtllm import Trtllm, write_checkpoint
from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE
from trtforge.cli.app import main
from trtforge.machine.processes import lives_in

PROGRAM = """
import sys
from dataclasses import replace
from trtforge.compile import stage
from trtforge.compile.machine import this_machine
stage.this_machine = lambda: replace(this_machine(), gpu=True)
from trtforge.cli.app import main
main()
"""


@pytest.fixture
def trtllm(tmp_path: Path) -> Trtllm:
    return Trtllm.install(tmp_path / "site")


def start(trtllm: Trtllm, tmp_path: Path, *words: str | Path, **variables: str) -> "subprocess.Popen[str]":
    environment = {**trtllm.environment, "TRTFORGE_CACHE": str(tmp_path / "cache"), **variables}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(trtllm: Trtllm, tmp_path: Path, *words: str | Path, **variables: str) -> tuple[int, str, str]:
    process = start(trtllm, tmp_path, *words, **variables)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return process.returncode, stdout, stderr


def compile_words(tmp_path: Path, *more: str) -> list[str | Path]:
    return ["compile", tmp_path / "checkpoint", tmp_path / "engine", "--backend", "tensorrt_llm", *more]


def test_an_engine_is_built_and_then_found(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    status, stdout, _ = run(trtllm, tmp_path, *compile_words(tmp_path, "--workers", "2", "--json"))
    assert status == 0
    assert json.loads(stdout)["cached"] is False
    assert json.loads(stdout)["next"] == f"trtforge package {tmp_path / 'engine'} REPOSITORY"
    status, stdout, _ = run(trtllm, tmp_path, *compile_words(tmp_path, "--workers", "1", "--json"))
    assert (status, json.loads(stdout)["cached"]) == (0, True)


def test_a_failure_that_is_known_is_explained(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    said = "[virtualMemoryBuffer.cpp::resizePhysical::127] Error Code 2: OutOfMemory (no further information)"
    trtllm.behaves(fails={"1": f"[11/21/2026-12:00:01] [TRT] [E] {said}"})
    status, stdout, stderr = run(trtllm, tmp_path, *compile_words(tmp_path))
    assert (status, stdout) == (1, "")
    error, hint = stderr.split("hint: ")
    assert error.startswith("error: rank 1 ended with status 1: GPU memory too small for the build\n")
    assert f"\n  {said}\n" in error
    assert hint.startswith("Lower max_batch_size")
    assert str(tmp_path / "engine.logs/rank1.log") in hint
    assert not (tmp_path / "engine").exists()


def test_a_failure_that_is_not_known_is_shown(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    trtllm.behaves(fails={"0": "[11/21/2026-12:00:01] [TRT] [E] the moon is in the wrong place"})
    status, _, stderr = run(trtllm, tmp_path, *compile_words(tmp_path))
    assert status == 1
    assert "rank 0 ended with status 1; its first error is not recognised:" in stderr
    assert "the moon is in the wrong place" in stderr
    assert f"hint: Its output is in {tmp_path / 'engine.logs/rank0.log'};" in stderr


def test_a_killed_rank_is_explained(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    trtllm.behaves(kills_itself={"0": True})
    status, _, stderr = run(trtllm, tmp_path, *compile_words(tmp_path))
    assert status == 1
    assert "rank 0 was ended by signal 9: killed for lack of host memory" in stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_rank_and_keeps_the_finished(
    tmp_path: Path, trtllm: Trtllm, number: signal.Signals, status: int
) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    trtllm.behaves(waits_for={"1": "never"})
    process = start(trtllm, tmp_path, *compile_words(tmp_path))
    while not (trtllm.site / "begun-1").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    words = f"trtforge compile {tmp_path / 'checkpoint'} {tmp_path / 'engine'} --backend tensorrt_llm"
    assert f"interrupted by {number.name}: {words}\n" in stderr
    assert stderr.endswith(f"hint: run again: {words}\n")
    assert "engine was interrupted: 2 finished files (" in stderr
    for call in trtllm.calls("build"):
        assert not Path(f"/proc/{call['pid']}").exists()
    kept = sorted(path.name for path in (tmp_path / ".engine.partial").iterdir())
    assert kept == [".finished.json", "config.json", "rank0.engine"]
    trtllm.behaves()
    trtllm.forget()
    assert run(trtllm, tmp_path, *compile_words(tmp_path))[0] == 0
    assert [call["rank"] for call in trtllm.calls("build")] == [1]


def test_a_kill_ends_every_rank_and_the_next_run_goes_on(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    trtllm.behaves(waits_for={"1": "never"})
    process = start(trtllm, tmp_path, *compile_words(tmp_path))
    while not (trtllm.site / "begun-1").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=PATIENCE)
    (leader,) = (call["pid"] for call in trtllm.calls("build") if call["rank"] == 1)
    while lives_in(leader, leader):
        time.sleep(0.02)
    trtllm.behaves()
    trtllm.forget()
    assert run(trtllm, tmp_path, *compile_words(tmp_path))[0] == 0
    assert [call["rank"] for call in trtllm.calls("build")] == [1]


def test_no_container_where_tensorrt_llm_is_another_release(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    Trtllm.install(trtllm.site, "1.1.0")
    status, _, stderr = run(trtllm, tmp_path, *compile_words(tmp_path, "--container", "none"))
    assert status == 1
    assert stderr.startswith("error: TensorRT-LLM 1.1.0 is installed, the engine is for 1.2.1\nhint: ")
    assert "--container IMAGE" in stderr


def test_docker_without_the_nvidia_runtime_is_explained(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    said = 'could not select device driver "" with capabilities: [[gpu]].'
    (trtllm.site / "docker-refuses").write_text(said)
    site = f"{trtllm.site}:{os.environ['PATH']}"
    status, _, stderr = run(trtllm, tmp_path, *compile_words(tmp_path, "--container", "mine"), PATH=site)
    assert status == 1
    assert "error: the query for versions and GPUs ended with status 1: " in stderr
    assert said in stderr
    assert "nvidia-container-toolkit" in stderr.lower().replace(" ", "-")


def test_zero_workers_are_wrong_usage(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    assert run(trtllm, tmp_path, *compile_words(tmp_path, "--workers", "0"))[0] == 2


def test_build_takes_workers_and_container(tmp_path: Path, trtllm: Trtllm) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: demo\nmodel: {{source: {DEMO_MODEL}}}\nparallel: {{tp: 2}}\n"
        "engine: {backend: tensorrt_llm, max_batch_size: 4}\n"
    )
    words = ["build", recipe, "--out", tmp_path / "build", "--workers", "2"]
    status, stdout, _ = run(trtllm, tmp_path, *words, "--dry-run", "--json", "--container", "registry.example/mine:1")
    assert status == 0
    plan = json.loads(stdout)["stages"]["compile"]
    assert plan["place"] == "a container of registry.example/mine:1"
    assert [option_of(run["command"], "--gpus") for run in plan["runs"]] == ["device=0", "device=1"]
    assert not (tmp_path / "build").exists()


def option_of(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.parametrize(
    ("backend", "option", "value", "of"),
    [
        ("tensorrt_llm", "--device", "auto", "torch"),
        ("llmapi", "--device", "cpu", "torch"),
        ("tensorrt_llm", "--compute-dtype", "float16", "torch"),
        ("llmapi", "--compute-dtype", "auto", "torch"),
        ("tensorrt_llm", "--int8-activations", "", "torch"),
        ("llmapi", "--workers", "1", "tensorrt_llm"),
        ("torch", "--workers", "2", "tensorrt_llm"),
    ],
)
def test_an_option_that_the_backend_ignores_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str, option: str, value: str, of: str
) -> None:
    words = ["compile", str(DEMO_MODEL), str(tmp_path / "engine"), "--backend", backend, "--dry-run"]
    words += [option, value] if value else [option]
    assert status_of(words) == 2
    stderr = capsys.readouterr().err
    assert f"error: {option} applies only to the {of} backend; the {backend} backend ignores it\n" in stderr
    assert f"hint: Leave it out, or choose the {of} backend.\n" in stderr


def test_options_that_are_not_given_are_not_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["compile", str(DEMO_MODEL), str(tmp_path / "engine"), "--backend", "llmapi", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == "llmapi"


def test_workers_for_a_recipe_of_another_backend_are_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: demo\nmodel: {{source: {DEMO_MODEL}}}\nengine: {{backend: torch, device: cpu}}\n")
    words = ["build", str(recipe), "--out", str(tmp_path / "build"), "--dry-run"]
    assert status_of([*words, "--workers", "2"]) == 2
    assert "error: --workers applies only to the tensorrt_llm backend; the torch backend" in capsys.readouterr().err
    assert status_of(words) == 0


def status_of(words: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["trtforge", *words])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0
