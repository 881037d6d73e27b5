"""Floor 5: the stage configurations of a recipe."""

from trtforge.calibrate.stage import CalibrateConfig
from trtforge.compile.stage import backend_of
from trtforge.convert.stage import ConvertConfig
from trtforge.core.features import Drafting
from trtforge.core.recipe import Recipe
from trtforge.models.formats import FORMATS, kv_scaling, measured
from trtforge.pipeline.stages import rounding_of


def calibrate_config(recipe: Recipe) -> CalibrateConfig:
    """The calibrate stage's configuration of a recipe."""
    quant, rounding = recipe.quantization, rounding_of(recipe)
    return CalibrateConfig.parse(
        {
            "format": quant.format if measured(quant.format, rounding) else "none",
            "awq_clip": quant.awq_clip,
            "rounding": rounding,
            "memory": quant.memory,
            "kv_cache": quant.kv_cache,
            "kv_scales": kv_scaling(quant.kv_cache, quant.kv_scales),
            "group_size": quant.group_size,
            "data": quant.calibration,
            "device": recipe.engine.device,
        },
        "quantization",
    )


def converted_drafting(recipe: Recipe) -> Drafting | None:
    """The Medusa heads or EAGLE network that conversion adds, if the recipe's backend builds a TensorRT engine.

    For the embedded engine, `compile` adds their files, for models of all families.
    """
    drafting = recipe.engine.features.medusa or recipe.engine.features.eagle
    if drafting is None or drafting.model is None or backend_of(recipe.engine) != "tensorrt_llm":
        return None
    return drafting


def convert_config(recipe: Recipe) -> ConvertConfig:
    """The convert stage's configuration of a recipe."""
    quant = recipe.quantization
    return ConvertConfig(
        tp=recipe.parallel.tp,
        pp=recipe.parallel.pp,
        ep=recipe.parallel.ep,
        dtype=recipe.model.dtype,
        quant=quant.format,
        kv_cache=quant.kv_cache,
        group_size=quant.group_size,
        exclude_modules=quant.exclude_modules,
        budget=quant.budget,
        allow_nonfinite=recipe.model.allow_nonfinite,
        shared_pre_quant_scale=recipe.engine.backend == "llmapi" and FORMATS[quant.format].smoothing == "awq",
    )
