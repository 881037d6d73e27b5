"""Floor 5: whether the artifacts that a partial build goes on from are those that the recipe's stages before make.

What a manifest tells is compared; content (data, weights) is the business of the stages that read it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Manifest, read_manifest
from trtforge.core.recipe import Recipe
from trtforge.formats.hf import QUANTIZATION_FILES, SOURCE_DIRECTORY, read_config
from trtforge.formats.quantization_config import read_quantized_source
from trtforge.models.formats import FORMATS
from trtforge.pipeline.stage_configs import calibrate_config, convert_config, needs_calibration

_OF_CALIBRATION = ("format", "kv_cache", "group_size", "awq_clip")
_OF_CHECKPOINT = ("tp", "pp", "ep", "exclude_modules", "shared_pre_quant_scale")


def require_calibration_of(recipe: Recipe, directory: Path) -> None:
    """Raises ForgeError unless `directory` holds the calibration that `recipe` asks for, where it needs one."""
    if needs_calibration(recipe):
        found = _manifest(directory, "calibrate").identity.config
        wanted = calibrate_config(recipe).model_dump(mode="json")
        _require_equal(directory, found, {key: wanted[key] for key in _OF_CALIBRATION}, "calibrate")


def require_checkpoint_of(recipe: Recipe, directory: Path) -> None:
    """Raises ForgeError unless `directory` holds a checkpoint of the layout and formats that `recipe` asks for."""
    manifest = _manifest(directory, "convert")
    asked = convert_config(recipe).model_dump(mode="json")
    wanted = {key: asked[key] for key in _OF_CHECKPOINT}
    if asked["dtype"] != "auto":
        wanted["dtype"] = asked["dtype"]
    if not _was_quantized(manifest, directory):  # else it keeps the formats that it came with
        wanted |= {key: asked[key] for key in ("quant", "kv_cache")}
        if FORMATS[recipe.quantization.format].smoothing == "awq":
            wanted["group_size"] = asked["group_size"]
    _require_equal(directory, manifest.identity.config, wanted, "convert")


def require_engine_of(checkpoint: Path, directory: Path) -> None:
    """Raises ForgeError for an engine in `directory` that was made from another checkpoint than the one that is there.

    (Without one there is nothing to compare: a checkpoint may be deleted once its engine is built.)
    """
    engine, there = _manifest(directory, "compile"), read_manifest(checkpoint)
    made_from = engine.identity.inputs.get("checkpoint")
    if there is not None and made_from not in (None, there.digest):
        raise ForgeError(f"{directory} was made from another checkpoint than {checkpoint}", hint="Use --from compile.")


def _manifest(directory: Path, stage: str) -> Manifest:
    manifest = read_manifest(directory)
    if manifest is None:
        raise ForgeError(f"{directory} is not there", hint=f"Use --from {stage}, which makes it.")
    return manifest


def _was_quantized(checkpoint: Manifest, directory: Path) -> bool:
    """Whether the model was quantised before it was converted."""
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
            f"{directory} is not what the recipe asks for: {there} there, {asked} in the recipe",
            hint=f"Use --from {stage}, or another --out.",
        )
