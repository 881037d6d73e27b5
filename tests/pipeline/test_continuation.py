"""Partial builds go on from what their recipe's earlier stages make, and from nothing else."""

from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL, MakeHf
from trtforge.calibrate.stage import calibrate
from trtforge.convert.stage import convert
from trtforge.core.artifact import produce
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Identity
from trtforge.core.recipe import Recipe
from trtforge.pipeline.continuation import require_calibration_of, require_checkpoint_of, require_engine_of
from trtforge.pipeline.stage_configs import calibrate_config, convert_config


def recipe(source: Path = DEMO_MODEL, **keys: object) -> Recipe:
    return Recipe.parse({"name": "mine", "model": {"source": str(source)}, **keys}, "mine")


FEW = {"samples": 2, "sequence_length": 16}
AWQ = recipe(quantization={"format": "int4_awq", "kv_cache": "int8", "calibration": FEW})


def test_a_calibration_of_other_choices_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "calibration"
    with pytest.raises(ForgeError, match="calibration does not exist") as absent:
        require_calibration_of(AWQ, out)
    assert absent.value.hint == "Use --from calibrate, which writes it."
    calibrate(calibrate_config(AWQ), DEMO_MODEL, out)
    require_calibration_of(AWQ, out)
    other = recipe(quantization={"format": "int4_awq", "kv_cache": "fp8", "group_size": 64, "calibration": FEW})
    with pytest.raises(ForgeError) as differs:
        require_calibration_of(other, out)
    assert differs.value.message == (
        f"{out} does not match the recipe: it has kv_cache int8, group_size 128, kv_scales searched, "
        "the recipe kv_cache fp8, group_size 64, kv_scales largest"
    )
    assert differs.value.hint == "Use --from calibrate, or another --out."


@pytest.mark.parametrize(
    ("keys", "there", "asked"),
    [
        ({"parallel": {"tp": 2}}, "tp 1", "tp 2"),
        ({"parallel": {"pp": 2}}, "pp 1", "pp 2"),
        ({"model": {"source": str(DEMO_MODEL), "dtype": "bfloat16"}}, "dtype float16", "dtype bfloat16"),
        ({"quantization": {"format": "int4_wo"}}, "quant int8_wo", "quant int4_wo"),
        ({"quantization": {}}, "quant int8_wo", "quant none"),
        (
            {"quantization": {"format": "int8_wo", "exclude_modules": ["*.0.*"]}},
            "exclude_modules []",
            "exclude_modules ['*.0.*']",
        ),
    ],
)
def test_a_checkpoint_of_other_choices_is_refused(
    make_hf: MakeHf, tmp_path: Path, keys: dict[str, object], there: str, asked: str
) -> None:
    made_of = recipe(quantization={"format": "int8_wo"})
    convert(convert_config(made_of), make_hf(), tmp_path / "checkpoint")
    require_checkpoint_of(made_of, tmp_path / "checkpoint", tmp_path / "calibration")
    keys = {"quantization": {"format": "int8_wo"}} | keys
    other = recipe().model_validate({**recipe().model_dump(), **keys})
    with pytest.raises(ForgeError) as differs:
        require_checkpoint_of(other, tmp_path / "checkpoint", tmp_path / "calibration")
    assert f"does not match the recipe: it has {there}, the recipe {asked}" in differs.value.message


def test_a_checkpoint_of_another_calibration_is_refused(tmp_path: Path) -> None:
    def asking(**keys: object) -> Recipe:
        made_with = {"rounding": "nearest", "kv_cache": "fp8", "calibration": FEW}
        return recipe(quantization={"format": "int4_awq"} | made_with | keys)

    calibration, checkpoint = tmp_path / "calibration", tmp_path / "checkpoint"
    made = calibrate(calibrate_config(asking()), DEMO_MODEL, calibration).path
    convert(convert_config(asking()), DEMO_MODEL, checkpoint, calibration=made)
    changes = {
        "awq_clip": ({"awq_clip": True}, "awq_clip False", "awq_clip True"),
        "rounding": ({"rounding": "auto"}, "rounding nearest", "rounding compensated"),
        "kv_scales": ({"kv_scales": "searched"}, "kv_scales largest", "kv_scales searched"),
        "samples": ({"calibration": FEW | {"samples": 3}}, "samples_asked 2", "samples_asked 3"),
        "length": ({"calibration": FEW | {"sequence_length": 8}}, "sequence_length 16", "sequence_length 8"),
        "seed": ({"calibration": FEW | {"seed": 5}}, "seed 0", "seed 5"),
    }
    for deleted in (False, True):
        if deleted:
            calibration.rename(tmp_path / "elsewhere")
        place = checkpoint if deleted else calibration
        require_checkpoint_of(asking(), checkpoint, calibration)
        for keys, there, asked in changes.values():
            with pytest.raises(ForgeError) as differs:
                require_checkpoint_of(asking(**keys), checkpoint, calibration)
            assert differs.value.message == f"{place} does not match the recipe: it has {there}, the recipe {asked}"
            assert differs.value.hint == "Use --from calibrate, or another --out."
    more = asking(calibration=FEW | {"samples": 3})
    calibrate(calibrate_config(more), DEMO_MODEL, calibration)
    with pytest.raises(ForgeError, match="was made with a calibration other than") as another:
        require_checkpoint_of(more, checkpoint, calibration)
    assert another.value.hint == "Use --from convert."


def test_an_engine_of_another_checkpoint_is_refused(make_hf: MakeHf, tmp_path: Path) -> None:
    checkpoint, engine = tmp_path / "checkpoint", tmp_path / "engine"
    digest = convert(convert_config(recipe()), make_hf(), checkpoint).manifest.digest

    def engine_of(made_from: str) -> None:
        produce(engine, Identity(stage="engine", inputs={"checkpoint": made_from}), lambda directory: {}, force=True)

    with pytest.raises(ForgeError, match="engine does not exist"):
        require_engine_of(checkpoint, engine)
    engine_of(digest)
    require_engine_of(checkpoint, engine)
    engine_of("another")
    with pytest.raises(ForgeError, match="engine was built from a checkpoint other than"):
        require_engine_of(checkpoint, engine)
    require_engine_of(tmp_path / "deleted", engine)
