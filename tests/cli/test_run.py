"""`trtforge run` and `infer --build` as a user types them: a model becomes an answer, and nothing stays behind."""

import subprocess
import sys
from pathlib import Path

import psutil

from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE


def trtforge(*words: str | Path, text: str = "", cwd: Path) -> subprocess.CompletedProcess[str]:
    """The program, in a session of its own."""
    command = [sys.executable, "-m", "trtforge", *map(str, words)]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=cwd, timeout=2 * PATIENCE)


def test_a_model_answers_in_one_command(tmp_path: Path) -> None:
    options = ("--quant", "int4_awq", "--set", "quantization.calibration.samples=16", "--set", "gate.samples=4")
    found = trtforge("run", DEMO_MODEL, *options, "--max-tokens", "8", text="What is a list?\n", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    build = tmp_path / "build" / "demo-model-int4_awq"
    assert sorted(path.name for path in build.iterdir() if path.is_dir()) == [
        "calibration", "checkpoint", "engine", "repository", "verification",
    ]  # fmt: skip
    assert (build / "recipe.yaml").is_file()
    answer = found.stdout
    assert answer.strip()
    again = trtforge("run", build, "--max-tokens", "8", text="What is a list?\n", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, answer)
    assert "calibrate" not in again.stderr
    asked = trtforge(
        "infer", "-", "--chat", "--build", build, "--max-tokens", "8", "--protocol", "http",
        text="What is a list?", cwd=tmp_path,
    )  # fmt: skip
    assert (asked.returncode, asked.stdout) == (0, answer)
    assert _servers(build) == []


def test_a_repository_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    found = trtforge("chat", "--build", tmp_path, text="hello\n", cwd=tmp_path)
    assert found.returncode == 1
    assert "error: " in found.stderr
    assert "Traceback" not in found.stderr


def _servers(build: Path) -> list[str]:
    """Processes that still serve the build."""
    words = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [line for line in words if str(build) in line]
