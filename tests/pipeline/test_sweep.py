"""One build in each format: a failed one does not stop the others, and the end says which failed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from trtforge.cli.chosen import Choice, Chosen, choose, choose_each
from trtforge.cli.sweep import build_each
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.recipe import Recipe
from trtforge.pipeline.report import BuildReport
from trtforge.pipeline.sweep import Attempt, Variant, sweep

FEW = {"samples": 2, "sequence_length": 32}


def recipe(**gate: Any) -> Recipe:
    """The demo model with a gate of few samples."""
    data = {"data": str(DEMO_MODEL / "heldout.txt"), **FEW}
    return Recipe.parse(
        {
            "name": "mine",
            "model": {"source": str(DEMO_MODEL)},
            "quantization": {"calibration": data},
            "engine": {"backend": "torch", "device": "cpu"},
            "gate": data | gate,
        },
        "mine",
    )


def chosen(made: Recipe, formats: Sequence[str], out: Path) -> dict[str, Chosen]:
    """The recipe in each format."""
    found = {}
    for name in formats:
        values = made.model_dump() | {"quantization": made.quantization.model_dump() | {"format": name}}
        found[name] = Chosen(Recipe.parse(values, "mine"), ("mine.yaml",), out / name, Path())
    return found


def variants(formats: Sequence[str]) -> list[Variant]:
    return [Variant(name, each.recipe, each.out) for name, each in chosen(recipe(), formats, Path("out")).items()]


def test_each_format_gets_a_recipe_and_a_directory() -> None:
    found = choose_each("demo-fp32", ["fp8", "none"], Choice(tp=2), ("gate.samples=3",))
    assert {name: each.out for name, each in found.items()} == {
        "fp8": Path("build/demo-fp32/fp8"), "none": Path("build/demo-fp32/none"),
    }  # fmt: skip
    assert [each.recipe.quantization.format for each in found.values()] == ["fp8", "none"]
    assert {(each.recipe.parallel.tp, each.recipe.gate.samples) for each in found.values()} == {(2, 3)}


def test_a_model_gets_a_recipe_for_each_format(tmp_path: Path) -> None:
    model, choice = "Qwen/Qwen2.5-7B-Instruct", Choice(gpu="h100-80gb")
    found = choose_each(model, ["fp8", "int4_awq"], choice, (), tmp_path)
    for name, each in found.items():
        alone = choose(model, Choice(quant=name, gpu="h100-80gb"), (), tmp_path / name)
        assert (each.recipe, each.text, each.named) == (alone.recipe, alone.text, alone.named)
    assert [each.recipe.gate.perplexity_increase for each in found.values()] == [0.02, 0.05]


@pytest.mark.parametrize(
    ("formats", "message"), [(["fp8", "fp6"], "fp6 is not a format"), (["fp8", "fp8"], "fp8 is given twice")]
)
def test_formats_that_cannot_be_are_wrong_usage(formats: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_each("demo-fp32", formats, Choice())


def test_a_failed_build_does_not_stop_the_others() -> None:
    ended: list[Attempt] = []

    def build(variant: Variant) -> BuildReport:
        if variant.format == "fp8":
            raise ForgeError("no space", hint="Free some.")
        return BuildReport(recipe=variant.format)

    found = sweep(variants(["none", "fp8", "int8_wo"]), build, ended.append)
    assert [(each.variant.format, each.report is None) for each in found] == [
        ("none", False),
        ("fp8", True),
        ("int8_wo", False),
    ]
    assert str(found[1].error) == "no space"
    assert tuple(ended) == found


def test_an_interruption_ends_the_sweep() -> None:
    def build(variant: Variant) -> BuildReport:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(variants(["none", "fp8"]), build, lambda attempt: None)


def test_formats_are_built_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_each(chosen(recipe(), ["none", "int8_wo"], tmp_path / "out"), tmp_path / "out", last="compile")
    printed = capsys.readouterr()
    assert "none" in printed.out.splitlines()[0]
    assert f"comparison: {tmp_path / 'out' / 'comparison.html'}" in printed.out
    assert "2 builds compared" in (tmp_path / "out" / "comparison.html").read_text()
    assert (tmp_path / "out" / "int8_wo" / "report.html").is_file()
    assert (tmp_path / "out" / "none" / "engine" / "forge.json").is_file()


def test_a_gate_that_fails_is_compared_and_fails_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ForgeError, match=r"1 of 2 builds failed: int8_wo"):
        build_each(chosen(recipe(kl_mean=1e-6), ["int8_wo", "none"], tmp_path), tmp_path, last="verify", json=True)
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [(build["name"], build["gate"]) for build in found["builds"]] == [("int8_wo", "failed"), ("none", "passed")]
    assert [each["format"] for each in found["failed"]] == ["int8_wo"]
    assert "the quality gate failed" in found["failed"][0]["error"]
    assert "error: int8_wo: the quality gate failed" in printed.err


def test_a_gate_that_is_known_to_fail_is_compared_by_its_own_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report.json there is of an earlier run, whose gate held."""
    built = chosen(recipe(kl_mean=1.0), ["int8_wo"], tmp_path)
    build_each(built, tmp_path, last="compile", quiet=True)
    capsys.readouterr()
    with pytest.raises(ForgeError, match=r"1 of 1 builds failed: int8_wo"):
        build_each(chosen(recipe(kl_mean=1e-6), ["int8_wo"], tmp_path), tmp_path, first="compile", json=True)
    (build,) = json.loads(capsys.readouterr().out)["builds"]
    assert (build["name"], build["gate"]) == ("int8_wo", "failed")
    stages = json.loads((tmp_path / "int8_wo" / "report.json").read_text())["stages"]
    assert [stage["stage"] for stage in stages] == ["convert", "verify", "compile"]
