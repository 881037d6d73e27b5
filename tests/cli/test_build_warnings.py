"""A build shows the warnings of its plan before the first stage, as `plan` and `--dry-run` do."""

import json
from pathlib import Path
from typing import Any

from tests.conftest import DEMO_MODEL


def test_warnings_come_before_the_first_stage(run: Any, tmp_path: Path) -> None:
    beyond = ["--set", "engine.max_seq_len=100000"]
    _, plan, _ = run("build", "demo-fp32", "--out", tmp_path / "out", "--dry-run", "--json", *beyond)
    (warning,) = json.loads(plan)["deployment"]["warnings"]
    assert "engine.max_seq_len 100000 is more than the model's context length of 2048" in warning
    status, _, said = run("build", "demo-fp32", "--out", tmp_path / "out", "--to", "convert", *beyond)
    assert status == 0
    assert said.index(f"warning: {warning}\n") < said.index("convert:")
    assert said.count("warning: ") == 1
    # A quiet build warns too: only progress is left out.
    _, _, said = run("build", "demo-fp32", "--out", tmp_path / "out", "--to", "convert", "--quiet", *beyond)
    assert said == f"warning: {warning}\n"


def test_compile_alone_warns_once_before_the_work(run: Any, tmp_path: Path) -> None:
    run("convert", DEMO_MODEL, tmp_path / "checkpoint", "--quiet")
    words = ["compile", tmp_path / "checkpoint", tmp_path / "engine", "--max-seq-len", "100000"]
    _, plan, said = run(*words, "--dry-run")
    (warning,) = json.loads(plan)["warnings"]
    assert "100000" in warning
    assert said == ""
    for more in ((), ("--quiet",), ("--json",)):  # the second and third find the engine, and warn too
        status, _, said = run(*words, *more)
        assert (status, said) == (0, f"warning: {warning}\n")


def test_a_build_from_compile_on_warns_once(run: Any, tmp_path: Path) -> None:
    beyond = ["--set", "engine.max_seq_len=100000", "--out", tmp_path / "out", "--quiet"]
    run("build", "demo-fp32", "--to", "convert", *beyond)
    status, _, said = run("build", "demo-fp32", "--from", "compile", "--to", "compile", *beyond)
    assert status == 0
    assert said.count("warning: ") == 1
    few = ["--set", "gate.samples=1", "--set", "gate.sequence_length=32"]
    status, _, said = run("build", "demo-fp32", "--from", "convert", "--to", "compile", *few, *beyond)
    assert (status, said.count("warning: engine.max_seq_len 100000")) == (0, 1)


def test_a_build_without_warnings_shows_none(run: Any, tmp_path: Path) -> None:
    _, _, said = run("build", "demo-fp32", "--out", tmp_path / "out", "--to", "convert", "--quiet")
    assert said == ""
