"""What the tab key completes, and that it loads nothing heavy."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from trtforge.cli import completion


def completed(line: str, *, here: Path = Path()) -> list[str]:
    """The completions of the last word of a command line, as bash asks for them."""
    words = line.split(" ")
    environment = {
        **os.environ,
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TRTFORGE_COMPLETE": "complete_bash",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    program = "import sys; sys.argv = ['trtforge']; from trtforge.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=here, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trtforge bui", ["build"]),
        ("trtforge build demo-", ["demo-fp32", "demo-fp8", "demo-int4awq", "demo-pp2", "demo-tp2"]),
        ("trtforge recipes show phi", ["phi-4-fp8", "phi-4-mini-fp8"]),
        ("trtforge plan x --gpu a100", ["a100-40gb", "a100-80gb", "a100"]),
        ("trtforge convert a b --quant int4", ["int4_awq", "int4_wo"]),
        ("trtforge build x --quant fp8,int4", ["fp8,int4_awq", "fp8,int4_wo"]),
        ("trtforge calibrate a b --kv-cache ", ["none", "fp8", "int8"]),
        ("trtforge compile a b --backend t", ["tensorrt_llm", "torch"]),
        ("trtforge compile a b --device c", ["cpu", "cuda"]),
        ("trtforge plan x --goal l", ["latency"]),
        ("trtforge build x --from c", ["calibrate", "convert", "compile"]),
        ("trtforge infer x --protocol h", ["http"]),
        ("trtforge calibrate a b --quant int4", ["int4_awq", "int4_wo"]),
        ("trtforge serve x --launcher s", ["slurm"]),
    ],
)
def test_words_are_completed(line: str, expected: list[str], tmp_path: Path) -> None:
    assert completed(line, here=tmp_path) == expected


def test_recipe_files_and_directories_are_completed(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "demo.yaml").touch()
    (tmp_path / "demo.txt").touch()
    assert completed("trtforge build de", here=tmp_path)[-2:] == ["deep/", "demo.yaml"]
    assert completed(f"trtforge build {DEMO_MODEL.parent}/demo-m", here=tmp_path) == [f"{DEMO_MODEL}/"]


@pytest.mark.parametrize(
    "name",
    [
        "recipes",
        "gpus",
        "formats",
        "calibrated_formats",
        "kv_formats",
        "dtypes",
        "devices",
        "backends",
        "goals",
        "launchers",
    ],
)
def test_completing_loads_nothing_heavy(name: str) -> None:
    program = (
        "import sys\n"
        "import trtforge.cli.app\n"
        "from trtforge.cli import completion\n"
        f"assert completion.{name}('')\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tritonclient', 'huggingface_hub', 'rich.console'}\n"
        "print(*sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("unreadable", ["iterdir", "is_dir"])
def test_nothing_is_completed_in_a_directory_that_cannot_be_read(
    unreadable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[[Path], object] = getattr(Path, unreadable)

    def refuse(path: Path) -> object:
        if path.is_relative_to(tmp_path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "mine.yaml").touch()
    assert completion.recipes(f"{tmp_path}/closed/") == [f"{tmp_path}/closed/mine.yaml"]
    monkeypatch.setattr(Path, unreadable, refuse)
    assert completion.recipes(f"{tmp_path}/closed/") == []
