"""The gate of a build: its limits judge the stored metrics, and a gate that fails names the command that helps."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from trtforge.cli.app import main
from trtforge.core.recipe import Recipe
from trtforge.pipeline.diagnosis import diagnosis_command
from trtforge.pipeline.paths import Paths

TEXT = str(DEMO_MODEL / "heldout.txt")
FEW = ["--set", f"gate.data={TEXT}", "--set", "gate.samples=2", "--set", "gate.sequence_length=32"]


def trtforge(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr("sys.argv", ["trtforge", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_other_limits_judge_the_same_metrics_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "build"
    quantised = ("quantization.format=int8_wo", "gate.perplexity_increase=1", "gate.top1_agreement=0.5")
    settings = [word for setting in quantised for word in ("--set", setting)]
    build = ["build", "demo-fp32", "--out", str(out), "--quiet", *settings, *FEW]

    def report() -> Any:
        return json.loads((out / "report.json").read_text())

    assert trtforge(monkeypatch, *build, "--set", "gate.kl_mean=1") == 0
    first = report()
    assert (first["verification"]["passed"], first["next"]) == (True, f"trtforge serve {out / 'repository'}")

    capsys.readouterr()
    assert trtforge(monkeypatch, *build, "--set", "gate.kl_mean=0") == 1
    failed = report()
    hint = capsys.readouterr().err.splitlines()[-1]
    assert hint.endswith(f"Find the cause: `{failed['next']}`. The metrics are in {out / 'report.json'}.")
    assert [(s["stage"], s["cached"]) for s in failed["stages"]] == [("convert", True), ("verify", True)]
    assert failed["verification"]["kl_mean"] == first["verification"]["kl_mean"]
    assert (failed["verification"]["passed"], len(failed["verification"]["failures"])) == (False, 1)
    assert failed["next"].startswith(f"trtforge verify {out / 'checkpoint'} --against {DEMO_MODEL} --layers")
    assert trtforge(monkeypatch, *shlex.split(failed["next"])[1:]) == 1  # it runs, and the gate fails again

    assert trtforge(monkeypatch, *build, "--set", "gate.kl_mean=0.5") == 0
    passed = report()
    assert [stage["cached"] for stage in passed["stages"]] == [True] * 4
    assert passed["verification"] == first["verification"]
    stored = json.loads((out / "verification" / "verification.json").read_text())
    assert stored["verification"]["failures"] == []

    reports = {path: path.read_bytes() for path in out.glob("report.*")}
    assert sorted(path.suffix for path in reports) == [".html", ".json", ".md"]
    capsys.readouterr()
    assert trtforge(monkeypatch, *build, "--set", "gate.kl_mean=0", "--from", "compile", "--json") == 1
    assert {path: path.read_bytes() for path in out.glob("report.*")} == reports
    assert [stage["stage"] for stage in report()["stages"]] == ["convert", "verify", "compile", "package"]
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["verification"]["passed"], found["stages"], found["next"]) == (False, [], failed["next"])
    error, hint = printed.err.splitlines()
    assert error.startswith("error: the quality gate failed: kl_mean is ")
    assert hint == (
        "hint: Use another format, or exclude layers (quantization.exclude_modules). Find the cause: "
        f"`{failed['next']}`. The metrics are in {out / 'verification' / 'verification.json'}."
    )


def test_a_calibrated_format_is_diagnosed_by_sensitivity_with_its_own_calibration() -> None:
    quantization = {"format": "int4_awq", "calibration": {"data": "a b.txt", "samples": 4, "sequence_length": 32}}
    recipe = Recipe.parse(
        {
            "name": "mine",
            "model": {"source": str(DEMO_MODEL)},
            "quantization": quantization,
            "gate": {"top1_agreement": 0.99, "data": TEXT, "samples": 2},
        },
        "mine",
    )
    assert diagnosis_command(recipe, Paths(Path("build/mine")), quantized=False) == (
        f"trtforge calibrate {DEMO_MODEL} build/mine/calibration --sensitivity --quant int4_awq --kv-cache none "
        "--data 'a b.txt' --samples 4 --seq-len 32 --batch-size 8 --seed 0 --device auto --group-size 128 "
        f"--gate top1_agreement=0.99,data={TEXT},samples=2,sequence_length=256"
    )
    scaled = recipe.quantization.model_copy(update={"kv_cache": "int8", "kv_scales": "largest"})
    command = diagnosis_command(
        recipe.model_copy(update={"quantization": scaled}), Paths(Path("build/mine")), quantized=False
    )
    assert "--group-size 128 --kv-scales largest --gate " in command
    changes = {"memory": 10**9}
    limited = recipe.model_copy(update={"quantization": recipe.quantization.model_copy(update=changes)})
    assert "verify build/mine/checkpoint" in diagnosis_command(limited, Paths(Path("build/mine")), quantized=False)
