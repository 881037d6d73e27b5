"""Floor 5: check that the artifacts that a partial build starts from match the recipe.

Only manifests are compared; the stages that read data and weights check their content.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trtforge.convert.drafting import drafting_settings
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Manifest, read_manifest
from trtforge.core.recipe import Recipe
from trtforge.formats.calibration import IN_CHECKPOINTS, OF_DATA, settings_of
from trtforge.formats.hf import QUANTIZATION_FILES, SOURCE_DIRECTORY, read_config
from trtforge.formats.quantization_config import read_quantized_source
from trtforge.models.formats import FORMATS
from trtforge.pipeline.stage_configs import calibrate_config, convert_config, converted_drafting
from trtforge.pipeline.stages import needs_calibration

_OF_CALIBRATION = ("format", "kv_cache", "group_size", "awq_clip", "rounding", "kv_scales")
_OF_CHECKPOINT = ("tp", "pp", "ep", "exclude_modules", "budget", "shared_pre_quant_scale")


def require_calibration_of(recipe: Recipe, directory: Path) -> None:
    """Raise ForgeError if `directory` does not have the calibration of `recipe`, which needs one."""
    found = settings_of(_manifest(directory, "calibrate"))
    _require_equal(directory, found, _asked(recipe, found, (*_OF_CALIBRATION, *OF_DATA)), "calibrate")


def require_checkpoint_of(recipe: Recipe, directory: Path, calibration: Path) -> None:
    """Raise ForgeError unless `directory` has a checkpoint with the layout and formats of `recipe`.

    `calibration`: where the recipe's calibration is. A missing one is accepted, as the checkpoint records its settings.
    """
    manifest = _manifest(directory, "convert")
    asked = convert_config(recipe).model_dump(mode="json")
    wanted = {key: asked[key] for key in _OF_CHECKPOINT}
    wanted |= {"medusa": None, "eagle": None} | drafting_settings(converted_drafting(recipe))
    if asked["dtype"] != "auto":
        wanted["dtype"] = asked["dtype"]
    quantized = _was_quantized(manifest, directory)
    # a quantised source keeps its formats, whatever is not asked for
    wanted |= {key: asked[key] for key in ("quant", "kv_cache") if not quantized or asked[key] != "none"}
    if quantized:
        del wanted["shared_pre_quant_scale"]
    elif FORMATS[recipe.quantization.format].smoothing == "awq":
        wanted["group_size"] = asked["group_size"]
    _require_equal(directory, manifest.identity.config, wanted, "convert")
    made_from = manifest.identity.inputs.get("calibration")
    if needs_calibration(recipe, quantized=quantized) and made_from is not None:
        _require_made_from(recipe, directory, manifest, calibration)


def _require_made_from(recipe: Recipe, directory: Path, checkpoint: Manifest, calibration: Path) -> None:
    """Raise ForgeError unless the checkpoint in `directory` was made with the recipe's calibration."""
    there = read_manifest(calibration)
    if there is not None:
        require_calibration_of(recipe, calibration)
        if checkpoint.identity.inputs["calibration"] != there.digest:
            raise ForgeError(
                f"{directory} was made with a calibration other than {calibration}", hint="Use --from convert."
            )
        return
    found = checkpoint.identity.config.get("calibration")
    if isinstance(found, dict):  # checkpoints of older versions do not record it
        _require_equal(directory, found, _asked(recipe, found, IN_CHECKPOINTS), "calibrate")


def _asked(recipe: Recipe, found: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The calibration settings of the recipe for these keys; settings of its data only if `found` records them."""
    config = calibrate_config(recipe)
    data = {"samples_asked": config.data.samples} | config.data.model_dump(include={"sequence_length", "seed"})
    asked = config.model_dump(mode="json") | data
    return {key: asked[key] for key in keys if found.get(key) is not None or key not in OF_DATA}


def require_engine_of(checkpoint: Path, directory: Path) -> None:
    """Raise ForgeError if the engine in `directory` was built from a checkpoint other than `checkpoint`.

    A missing checkpoint is accepted: it may be deleted once the engine is built.
    """
    engine, there = _manifest(directory, "compile"), read_manifest(checkpoint)
    made_from = engine.identity.inputs.get("checkpoint")
    if there is not None and made_from not in (None, there.digest):
        raise ForgeError(f"{directory} was built from a checkpoint other than {checkpoint}", hint="Use --from compile.")


def _manifest(directory: Path, stage: str) -> Manifest:
    manifest = read_manifest(directory)
    if manifest is None:
        raise ForgeError(f"{directory} does not exist", hint=f"Use --from {stage}, which writes it.")
    return manifest


def _was_quantized(checkpoint: Manifest, directory: Path) -> bool:
    """Whether the Hugging Face checkpoint was already quantised."""
    if not checkpoint.identity.inputs.keys().isdisjoint(QUANTIZATION_FILES):
        return True
    source = directory / SOURCE_DIRECTORY
    return source.is_dir() and read_quantized_source(read_config(source)) is not None


def _require_equal(directory: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], stage: str) -> None:
    differing = [key for key, value in wanted.items() if found.get(key) != value]
    if differing:
        there = ", ".join(f"{key} {found.get(key)}" for key in differing)
        asked = ", ".join(f"{key} {wanted[key]}" for key in differing)
        raise ForgeError(
            f"{directory} does not match the recipe: it has {there}, the recipe {asked}",
            hint=f"Use --from {stage}, or another --out.",
        )
