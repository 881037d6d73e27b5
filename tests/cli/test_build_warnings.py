"""A build shows the warnings of its plan before the first stage, as `plan` and `--dry-run` do."""

import json
from pathlib import Path
from typing import Any


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


def test_a_build_without_warnings_shows_none(run: Any, tmp_path: Path) -> None:
    _, _, said = run("build", "demo-fp32", "--out", tmp_path / "out", "--to", "convert", "--quiet")
    assert said == ""
