"""Which exclusions a gate needs: found by converting and verifying the demo model."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import DEMO_MODEL
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.cli.app import app
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import GateConfig
from trtforge.pipeline.sensitivity import analyse
from trtforge.verify.stage import verify

CONFIG = CalibrateConfig.parse({"format": "int4_awq", "data": {"samples": 16, "sequence_length": 128}}, "test")


def gate(**limits: float) -> GateConfig:
    return GateConfig.parse(
        {"data": str(DEMO_MODEL / "heldout.txt"), "samples": 4, "sequence_length": 128} | limits, "test"
    )


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrate(CONFIG, DEMO_MODEL, tmp_path_factory.mktemp("sensitivity") / "calibration").path


def test_proposal_meets_the_gate_and_one_exclusion_fewer_does_not(calibration: Path) -> None:
    everything = analyse(CONFIG, DEMO_MODEL, calibration, gate()).everything.verification.kl_mean
    limits = gate(kl_mean=0.8 * everything)
    found = analyse(CONFIG, DEMO_MODEL, calibration, limits)
    assert found.proposal is not None
    excluded = found.proposal.exclude_modules
    ranking = [damage.modules for damage in found.ranking]
    count = next(n for n in range(len(ranking)) if sum(map(len, ranking[:n])) == len(excluded))
    assert excluded == tuple(module for modules in ranking[:count] for module in modules)

    def passes(modules: tuple[str, ...], name: str) -> bool:
        config = ConvertConfig(quant="int4_awq", exclude_modules=modules)
        out = convert(config, DEMO_MODEL, calibration.parent / name, calibration=calibration).path
        return verify(out, DEMO_MODEL, limits).passed

    assert passes(excluded, "proposed")
    assert not passes(tuple(module for modules in ranking[: count - 1] for module in modules), "fewer")
    assert [path.name for path in calibration.parent.glob(".*")] == []


def test_nothing_is_excluded_where_the_gate_holds(calibration: Path) -> None:
    found = analyse(CONFIG, DEMO_MODEL, calibration, gate(perplexity_increase=0.5))
    assert found.proposal is found.everything
    assert found.everything.exclude_modules == ()
    assert len(found.ranking) == 16


def test_an_unreachable_gate_is_said(tmp_path: Path) -> None:
    """The KV cache is quantised however many layers are left out."""
    command = ["calibrate", str(DEMO_MODEL), str(tmp_path / "out"), "--quant", "fp8", "--kv-cache", "fp8"]
    command += ["--samples", "4", "--seq-len", "64", "--sensitivity"]
    limits = f"kl_mean=0,data={DEMO_MODEL / 'heldout.txt'},samples=2,sequence_length=64"
    done = CliRunner().invoke(app, [*command, "--gate", limits, "--json"], standalone_mode=False)
    assert "no exclusions meet the gate: kl_mean is" in str(done.exception)
    result = json.loads(done.stdout)
    assert result["sensitivity"]["proposal"] is None
    assert result["sensitivity"]["without_exclusions"]["verification"]["passed"] is False
    assert [len(entry["modules"]) for entry in result["sensitivity"]["ranking"]].count(3) == 4  # query, key, value
    assert (tmp_path / "out" / "forge.json").exists()
    kept = json.loads((tmp_path / "out-sensitivity.json").read_text())
    assert (kept["calibration"], kept["ranking"]) == (result["digest"], result["sensitivity"]["ranking"])


FEW = ["--quant", "int8_sq", "--samples", "2", "--seq-len", "32", "--sensitivity", "--quiet"]
EASY = f"kl_mean=9,data={DEMO_MODEL / 'heldout.txt'},samples=2,sequence_length=32"


def test_the_current_directory_can_be_the_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    command = ["calibrate", os.path.relpath(DEMO_MODEL), ".", *FEW, "--gate", EASY, "--json"]
    for origin in ("written", "already right"):
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        result = json.loads(done.stdout)
        assert (done.exit_code, result["artifact"]) == (0, ".")
        assert result["origin"] in (origin, "from the cache")
        kept = json.loads((tmp_path / "here-sensitivity.json").read_text())
        assert (kept["calibration"], kept["ranking"]) == (result["digest"], result["sensitivity"]["ranking"])
    assert sorted(path.name for path in Path().iterdir()) == ["calibration.safetensors", "forge.json"]


def test_a_ranking_that_cannot_be_kept_is_shown(tmp_path: Path) -> None:
    (tmp_path / "out-sensitivity.json").mkdir()
    command = ["calibrate", str(DEMO_MODEL), str(tmp_path / "out"), *FEW, "--gate", EASY]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    assert "the gate passes without exclusions" in done.stdout
    assert f"next: trtforge convert {DEMO_MODEL} CHECKPOINT" in done.stdout
    assert done.stderr == (
        f"warning: {tmp_path / 'out-sensitivity.json'}: Is a directory; reports of builds will not show the ranking\n"
    )
