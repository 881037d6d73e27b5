"""`trtforge build` from one stage on, and up to one: what is kept, what is reported, what the gate stops."""

import json
from pathlib import Path
from typing import Any

from tests.conftest import DEMO_MODEL


def test_a_build_goes_on_from_any_stage(run: Any, tmp_path: Path) -> None:
    recipe = ("demo-fp8", "--set", "quantization.calibration.samples=8", "--set", "gate.samples=8")

    def build(*words: str) -> Any:
        """What `trtforge build` reports."""
        status, printed, errors = run("build", *recipe, "--out", tmp_path, "--json", *words)
        assert status == 0, errors
        return json.loads(printed)

    report = build()
    assert [stage["cached"] for stage in build()["stages"]] == [True] * 5
    build("--from", "package")
    kept = json.loads((tmp_path / "report.json").read_text())
    assert (kept["verification"], kept["compression"]) == (report["verification"], report["compression"])
    build("--to", "calibrate")
    calibrated = json.loads((tmp_path / "report.json").read_text())
    assert (calibrated["verification"], calibrated["compression"]) == (None, None)  # what is there is an earlier run's
    (tmp_path / "checkpoint" / "rank0.safetensors").rename(tmp_path / "away")
    after = build("--from", "package")
    assert (after["verification"], after["compression"]) == (report["verification"], report["compression"])
    (tmp_path / "away").rename(tmp_path / "checkpoint" / "rank0.safetensors")

    few = ("--samples", "4", "--data", DEMO_MODEL / "heldout.txt", "--json")
    figures = json.loads(run("verify", tmp_path / "engine", "--against", DEMO_MODEL, *few)[1])
    assert abs(figures["perplexity"]["increase"]) < 0.05


def test_a_gate_that_does_not_hold_stops_the_build(run: Any, tmp_path: Path) -> None:
    command = ("build", "demo-fp32", "--out", tmp_path)
    gate = ("--set", "quantization.format=int8_wo", "--set", "gate.kl_mean=0", "--set", "gate.samples=8")
    for begin in ((), ("--from", "compile")):
        status, _, errors = run(*command, *gate, *begin)
        assert status == 1
        assert "error: the quality gate failed: " in errors
        assert not (tmp_path / "engine").exists()
        assert json.loads((tmp_path / "report.json").read_text())["verification"]["passed"] is False
