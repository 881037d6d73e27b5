"""Builds of models that are already quantised have no calibration: stages, continuation, advice and locks."""

from pathlib import Path
from typing import Any

import pytest

from tests.quantized import AWQ, awq, quantized_demo
from trtforge.core.errors import ForgeError
from trtforge.core.progress import Silent
from trtforge.core.recipe import Recipe
from trtforge.machine.host import Host
from trtforge.pipeline.build import Build, GateError
from trtforge.pipeline.lock import read_locked, write_locked
from trtforge.pipeline.lock_facts import what_is_used
from trtforge.pipeline.stages import StageName, selected


def recipe_for(source: Path, quant: str, **changes: Any) -> Recipe:
    """A recipe whose calibration data does not exist."""
    values = {
        "name": "mine",
        "model": {"source": str(source)},
        "quantization": {"format": quant, "calibration": {"data": "missing.txt"}},
        "engine": {"backend": "torch", "device": "cpu"},
        "gate": {"samples": 2, "sequence_length": 64, "perplexity_increase": 1.0},
    }
    return Recipe.parse(values | changes, "test")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In AutoAWQ's format."""
    return quantized_demo(tmp_path_factory.mktemp("awq") / "hf", awq(), AWQ).directory


def built(recipe: Recipe, out: Path, first: StageName = "calibrate", last: StageName = "convert") -> list[str]:
    """The stages that a build runs."""
    started: list[str] = []
    Build(recipe, out, Silent()).run(selected(recipe, first, last), started.append)
    return started


@pytest.mark.parametrize("quant", ["none", "int4_awq"])
def test_a_recipe_may_name_the_format_of_the_source(source: Path, tmp_path: Path, quant: str) -> None:
    assert built(recipe_for(source, quant), tmp_path / "out") == ["convert"]
    assert built(recipe_for(source, quant), tmp_path / "out", "convert") == ["convert"]


def test_a_build_up_to_calibration_has_nothing_to_do(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=f"mine needs no calibration: {source} is already quantised") as error:
        built(recipe_for(source, "int4_awq"), tmp_path / "out", last="calibrate")
    assert error.value.hint == "Use --to convert."
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("backend", [{"backend": "torch", "device": "cpu"}, {"backend": "llmapi"}], ids=str)
def test_a_checkpoint_of_the_source_is_continued_in_its_formats_alone(
    source: Path, tmp_path: Path, backend: dict[str, str]
) -> None:
    out = tmp_path / "out"
    built(recipe_for(source, "none", engine=backend), out)
    for quant in ("none", "int4_awq"):
        assert built(recipe_for(source, quant, engine=backend), out, "compile", "compile") == ["compile"]
    for changes, there, asked in (
        ({"format": "fp8"}, "quant int4_awq", "quant fp8"),
        ({"format": "int4_awq", "kv_cache": "fp8"}, "kv_cache none", "kv_cache fp8"),
    ):
        with pytest.raises(ForgeError, match=f"it has {there}, the recipe {asked}"):
            built(recipe_for(source, "none", quantization=changes), out, "compile", "compile")


def test_a_failed_gate_proposes_no_calibration(source: Path, tmp_path: Path) -> None:
    gate = {"samples": 2, "sequence_length": 64, "top1_agreement": 1.0, "kl_p99": 0}
    recipe = recipe_for(source, "int4_awq", gate=gate)
    with pytest.raises(GateError) as failed:
        built(recipe, tmp_path / "out", last="verify")
    advice = "Use the original float16 or bfloat16 checkpoint, which trtforge quantises, or wider limits (gate)."
    assert failed.value.hint.startswith(advice)
    verify = f"trtforge verify {tmp_path / 'out' / 'checkpoint'} --against {source} --layers "
    assert failed.value.report.next_command.startswith(verify)


def test_a_lock_has_no_calibration_data(source: Path, tmp_path: Path) -> None:
    lock = tmp_path / "forge.lock"
    used = what_is_used(recipe_for(source, "int4_awq"), lock, host=Host(environment={"PATH": ""}))
    assert used.data == {}  # the gate's builtin:stdlib belongs to Python
    write_locked(lock, "mine", used)
    assert read_locked(lock, "mine") == used


def test_a_budget_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    recipe = recipe_for(source, "int4_awq", quantization={"format": "int4_awq", "budget": 6})
    with pytest.raises(ForgeError, match="already quantised") as error:
        built(recipe, tmp_path / "out", last="verify")
    assert "quantization.budget" in error.value.hint
    assert not (tmp_path / "out").exists()
