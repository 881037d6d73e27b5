"""`trtforge doctor` as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_app import trtforge
from tests.patience import PATIENCE

LOG = """\
[1,1]<stderr>:[TensorRT-LLM][ERROR] Assertion failed: MPI size 1 != TP size 2 * PP size 1
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
"""


def test_machine_is_described_as_json() -> None:
    done = trtforge("doctor", "demo-int4awq", "--json")
    report = json.loads(done.stdout)
    assert report["recipe"] == "demo-int4awq"
    assert done.returncode == (0 if report["fit"] else 1)
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert {"driver", "memory", "/dev/shm", "CPU", "port 8000", "Triton", "torch", "model"} <= set(findings)
    assert findings["model"]["found"].startswith("LlamaForCausalLM")


def test_problem_is_status_1_with_error_and_hint(tmp_path: Path) -> None:
    done = trtforge("doctor", "demo-fp32", "--set", f"model.source={tmp_path}")
    assert done.returncode == 1
    assert "Fit for demo-fp32" in done.stdout
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")


def test_log_is_explained(tmp_path: Path) -> None:
    (tmp_path / "triton.log").write_text(LOG)
    done = trtforge("doctor", "--log", tmp_path / "triton.log")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "first error: number of ranks is not tp*pp",
        "  line 1, rank 1: Assertion failed: MPI size 1 != TP size 2 * PP size 1",
        "means: 1 MPI processes were started; the engine was built for tensor parallelism 2 times pipeline parallelism "
        "1.",
        "do: Start one process for each rank: `trtforge serve` reads the layout from the engine and does so, or "
        "`mpirun -n <tp*pp>` by hand.",
        "source: TensorRT-LLM issue #1992",
        "later errors:",
        "  line 2: a rank aborted all ranks",
        "    Rank 1 aborted all ranks, because of an earlier error of its own.",
    ]
    assert done.stderr.startswith(f"error: {tmp_path}/triton.log:1: number of ranks is not tp*pp\nhint: Start one")


def test_log_from_standard_input_as_json() -> None:
    command = [sys.executable, "-m", "trtforge", "doctor", "--log", "-", "--json"]
    done = subprocess.run(command, input=LOG, capture_output=True, text=True, check=False, timeout=PATIENCE)
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert (found["log"], found["error"], found["recognised"]) == ("standard input", True, True)
    assert found["diagnosis"]["id"] == "mpi-size-counted"
    assert found["diagnosis"]["values"] == {"ranks": "1", "tp": "2", "pp": "1"}
    assert (found["diagnosis"]["line"], found["diagnosis"]["rank"]) == (1, 1)
    assert [other["id"] for other in found["secondary"]] == ["mpi-abort"]


def test_unknown_error_is_shown(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("Traceback (most recent call last):\n  File 'a.py'\nValueError: new\n")
    done = trtforge("doctor", "--log", tmp_path / "log")
    assert done.returncode == 1
    assert done.stdout == "first error: not recognised\n  line 2: File 'a.py'\n  line 3: ValueError: new\n"
    assert "an unrecognised error" in done.stderr


def test_clean_log_is_status_0(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("[TensorRT-LLM][INFO] ready\n")
    done = trtforge("doctor", "--log", tmp_path / "log")
    assert (done.returncode, done.stdout, done.stderr) == (0, "no error in 1 line\n", "")


def test_missing_log_is_an_error(tmp_path: Path) -> None:
    done = trtforge("doctor", "--log", tmp_path / "none")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'none'}: No such file or directory\nhint: ")


@pytest.mark.parametrize(
    "words", [("demo-fp32", "--log", "x"), ("--log", "x", "--image", "26.05"), ("--set", "engine.backend=torch")]
)
def test_questions_that_exclude_one_another_are_wrong_usage(words: tuple[str, ...]) -> None:
    assert trtforge("doctor", *words).returncode == 2
