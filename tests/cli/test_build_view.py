"""What a user sees of a build: the header, lines of a log, the table, and what --quiet, --json and failures leave."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.screen import plain, terminal
from tests.conftest import DEMO_MODEL
from tests.pipeline.records import full, quality
from trtforge.cli.app import main
from trtforge.cli.build_view import show_report

DATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d (\w+): (.+)")
FEW = [
    "--set", f"gate.data={DEMO_MODEL / 'heldout.txt'}", "--set", "gate.samples=2", "--set", "gate.sequence_length=32",
]  # fmt: skip


def lines_of_log(text: str) -> list[tuple[str, str]]:
    """Stage and text of the dated lines."""
    return [(found[1], found[2]) for line in text.splitlines() if (found := DATED.fullmatch(line))]


def test_a_log_has_a_dated_line_when_a_stage_starts_and_when_it_ends(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, printed, said = run("build", "demo-fp32", "--out", out, *FEW)
    assert status == 0
    lines = lines_of_log(said)
    stages = ("convert", "verify", "compile", "package")
    assert [(stage, text == "started") for stage, text in lines] == [
        (stage, first) for stage in stages for first in (True, False)
    ]
    assert re.fullmatch(rf"done in \d+\.\d s, \d+(\.\d+)? MB in {out}/checkpoint", lines[1][1])
    assert re.fullmatch(r"done in \d+\.\d s", lines[3][1])

    status, again, said = run("build", "demo-fp32", "--out", out, *FEW)
    assert [text for _, text in lines_of_log(said)] == ["started", "already right"] * 4
    rows = [line.split() for line in again.splitlines() if line.split()[:1] in [[stage] for stage in stages]]
    assert [row[:6] for row in rows] == [[stage, "already", "right", "-", "-", "-"] for stage in stages]
    assert "measured by an earlier run" in again
    assert "measured by an earlier run" not in printed
    assert ["calibrate", "not", "needed", "-", "-", "-"] in [line.split() for line in printed.splitlines()]


def test_the_report_lies_beside_the_artifacts(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("build", "demo-fp32", "--out", out, *FEW)[0] == 0
    report = json.loads((out / "report.json").read_text())
    assert {"recipe", "stages", "verification", "compression", "next"} < report.keys()
    assert report["model"]["parameters"] == 4_065_536
    assert report["engine_bytes"] == sum(stage["bytes"] for stage in report["stages"] if stage["stage"] == "compile")
    assert report["gate"]["data"] == str(DEMO_MODEL / "heldout.txt")
    assert [layer["layer"] for layer in report["verification"]["layers"]] == [0, 1, 2, 3]
    assert report["versions"].keys() >= {"trtforge", "python", "torch", "transformers"}
    assert report["settings"]["name"] == "demo-fp32"
    assert [gpu["name"] for gpu in report["memory"]] == ["rank 0"]
    assert '<section id="layers">' in (out / "report.html").read_text()
    assert (out / "report.md").read_text().startswith("## demo-fp32: passed\n")


def test_a_terminal_sees_the_header_and_no_dates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["trtforge", "build", "demo-fp32", "--out", str(tmp_path), "--to", "convert"])
    with terminal(80) as (out, err), pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    said = plain(err.getvalue())
    assert said.startswith("Build demo-fp32\n  model     recipes/demo-model, llama, 4.07 M parameters, 8.14 MB\n")
    assert "  layout    tp 1, pp 1 on embedded engine\n" in said
    assert re.search(r"^convert: done in \d\.\d s$", said, re.M)
    assert lines_of_log(said) == []
    assert "Build demo-fp32" in out.getvalue()


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_quiet_and_json_leave_stderr_empty(run: Any, tmp_path: Path, option: str) -> None:
    status, printed, said = run("build", "demo-fp32", "--out", tmp_path / "out", "--to", "convert", option)
    assert (status, said) == (0, "")
    assert (option == "--json") == printed.startswith("{")


def test_a_failed_stage_says_so(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtforge.core.errors import ForgeError
    from trtforge.pipeline import build

    def fail(*_: object, **__: object) -> None:
        raise ForgeError("the disk is full", hint="Free space.")

    monkeypatch.setattr(build, "convert", fail)
    status, printed, said = run("build", "demo-fp32", "--out", tmp_path / "out")
    assert (status, printed) == (1, "")
    assert lines_of_log(said) == [("convert", "started"), ("convert", "failed")]
    assert said.endswith("error: the disk is full\nhint: Free space.\n")


def test_a_gate_that_fails_is_shown_with_its_limit(run: Any, tmp_path: Path) -> None:
    words = ["build", "demo-fp32", "--out", tmp_path / "out", "--set", "quantization.format=int8_wo", *FEW]
    status, printed, said = run(*words, "--set", "gate.kl_mean=0")
    assert status == 1
    assert lines_of_log(said)[-1] == ("verify", "failed")
    assert re.search(r"^KL mean .* at most 0 +failed$", printed, re.M)
    assert re.search(r"^gate +failed$", printed, re.M)
    assert (tmp_path / "out" / "report.md").read_text().startswith("## demo-fp32: failed\n")


def test_the_header_comes_before_the_stages_are_loaded() -> None:
    program = (
        "import sys\n"
        "from trtforge.cli.build_view import BuildView\n"
        "def stop(*_):\n"
        "    raise SystemExit(0)\n"
        "shown = BuildView.header\n"
        "BuildView.header = lambda *words: (shown(*words), stop())\n"
        "sys.argv = ['trtforge', 'build', 'llama-3.1-70b-fp8']\n"
        "from trtforge.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'jinja2', 'trtforge.pipeline.build'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(
        "Build llama-3.1-70b-fp8\n  model     meta-llama/Llama-3.1-70B-Instruct, llama, 70.6 B"
    )
    assert "tp 4, pp 1 on 4 x h100-80gb" in done.stderr


def test_a_model_that_is_not_known_is_shown_by_its_name(tmp_path: Path) -> None:
    from trtforge.cli.build_view import header_lines
    from trtforge.core.recipe import Recipe

    recipe = Recipe.parse({"name": "x", "model": {"source": "nobody/nothing"}}, "test")
    assert header_lines(recipe, Path("build/x"), 80)[1] == "  model     nobody/nothing"


def test_a_build_that_ran_no_stage_shows_no_table_and_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Its gate is known to fail; the report beside it is of an earlier build."""
    show_report(full(stages=[], verification=quality(passed=False)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Build ")
    assert not any(line.startswith(("stage ", "report ")) for line in lines)
    assert "failed" in next(line for line in lines if line.startswith("gate "))
