"""Floor 5: the stages of a build, and those that a recipe has. Imports no stage, so that commands start fast."""

from typing import Literal, get_args

from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.recipe import Recipe, RoundingMethod
from trtforge.models.formats import measured, rounding_method
from trtforge.plan.formats import CACHES

StageName = Literal["calibrate", "convert", "verify", "compile", "package"]
STAGES: tuple[StageName, ...] = get_args(StageName)


def selected(recipe: Recipe, first: StageName, last: StageName) -> tuple[StageName, ...]:
    """The stages from `first` to `last` that this recipe has for an unquantised model; see `of_quantized` for others.

    Raises ForgeError for an empty selection.
    """
    if STAGES.index(first) > STAGES.index(last):
        raise UsageError(f"--from {first} comes after --to {last}", hint=f"The order of stages is {', '.join(STAGES)}.")
    stages = STAGES[STAGES.index(first) : STAGES.index(last) + 1]
    chosen = tuple(stage for stage in stages if stage != "calibrate" or needs_calibration(recipe, quantized=False))
    if not chosen:
        raise ForgeError(f"{recipe.name} needs no calibration", hint="Use --to convert.")
    return chosen


def of_published(recipe: Recipe, stages: tuple[StageName, ...], *, same_weights: bool) -> tuple[StageName, ...]:
    """The `stages` that apply to a model that is served as it was published. Raises ForgeError if none does.

    `same_weights`: conversion writes the served weights in 16 bits. Conversion and verification then run if no later
    stage was requested.
    """
    engine: tuple[StageName, ...] = ("compile", "package")
    checkpoint: tuple[StageName, ...] = ("convert", "verify") if same_weights else ()
    chosen = tuple(stage for stage in stages if stage in engine)
    if not chosen:
        chosen = tuple(stage for stage in stages if stage in checkpoint)
    if not chosen:
        raise ForgeError(
            f"{recipe.name}: the LLM API serves {recipe.model.source} as it is published: nothing is calibrated, "
            "converted or verified",
            hint="Use --to compile, or another quantization.format or engine.backend.",
        )
    return chosen


def of_quantized(recipe: Recipe, stages: tuple[StageName, ...]) -> tuple[StageName, ...]:
    """The `stages` that apply to a model that is already quantised. Raises ForgeError if none does."""
    chosen = tuple(stage for stage in stages if stage != "calibrate")
    if not chosen:
        raise ForgeError(
            f"{recipe.name} needs no calibration: {recipe.model.source} is already quantised", hint="Use --to convert."
        )
    return chosen


def needs_calibration(recipe: Recipe, *, quantized: bool) -> bool:
    """Whether the weights or the KV cache need calibration samples.

    `quantized`: the model is already quantised; its own scales are kept.
    """
    quant = recipe.quantization
    if quantized:
        return False
    return measured(quant.format, rounding_of(recipe)) or CACHES[quant.kv_cache].calibrated


def rounding_of(recipe: Recipe) -> RoundingMethod:
    """How a recipe rounds weights. Raises UsageError for a method that the format does not have."""
    quant = recipe.quantization
    return rounding_method(quant.format, quant.rounding, data=quant.calibration.named)
