"""One build in each format: a failed one does not stop the others, and the end says which failed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from trtforge.cli.sweep import build_each
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.recipe import Recipe
from trtforge.pipeline.report import BuildReport
from trtforge.pipeline.sweep import Attempt, Variant, sweep, variants

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


def test_each_format_gets_a_recipe_and_a_directory() -> None:
    found = variants(recipe(), ["fp8", "none"], Path("out"))
    assert [(each.format, each.out) for each in found] == [("fp8", Path("out/fp8")), ("none", Path("out/none"))]
    assert [each.recipe.quantization.format for each in found] == ["fp8", "none"]
    assert found[0].recipe.quantization.calibration == recipe().quantization.calibration


@pytest.mark.parametrize(
    ("formats", "message"), [(["fp8", "fp6"], "fp6 is not a format"), (["fp8", "fp8"], "fp8 is given twice")]
)
def test_formats_that_cannot_be_are_wrong_usage(formats: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        variants(recipe(), formats, Path("out"))


def test_a_failed_build_does_not_stop_the_others() -> None:
    ended: list[Attempt] = []

    def build(variant: Variant) -> BuildReport:
        if variant.format == "fp8":
            raise ForgeError("no space", hint="Free some.")
        return BuildReport(recipe=variant.format)

    found = sweep(variants(recipe(), ["none", "fp8", "int8_wo"], Path("out")), build, ended.append)
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
        sweep(variants(recipe(), ["none", "fp8"], Path("out")), build, lambda attempt: None)


def test_formats_are_built_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_each(recipe(), ["none", "int8_wo"], tmp_path / "out", last="compile")
    printed = capsys.readouterr()
    assert "none" in printed.out.splitlines()[0]
    assert f"comparison: {tmp_path / 'out' / 'comparison.html'}" in printed.out
    assert "2 builds compared" in (tmp_path / "out" / "comparison.html").read_text()
    assert (tmp_path / "out" / "int8_wo" / "report.html").is_file()
    assert (tmp_path / "out" / "none" / "engine" / "forge.json").is_file()


def test_a_gate_that_fails_is_compared_and_fails_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ForgeError, match=r"1 of 2 builds failed: int8_wo"):
        build_each(recipe(kl_mean=1e-6), ["int8_wo", "none"], tmp_path, last="verify", json=True)
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [(build["name"], build["gate"]) for build in found["builds"]] == [("int8_wo", "failed"), ("none", "passed")]
    assert [each["format"] for each in found["failed"]] == ["int8_wo"]
    assert "the quality gate does not hold" in found["failed"][0]["error"]
    assert "error: int8_wo: the quality gate does not hold" in printed.err
