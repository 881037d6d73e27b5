"""Mixed precision within a budget of bits: which requests cannot have one, and the share of weights per format.

The formats themselves are chosen after calibration (pipeline.mixed).
"""

from collections.abc import Iterator
from math import ceil

from trtforge.core.parallel import Parallel
from trtforge.core.recipe import Backend, QuantFormat
from trtforge.models.family import Facts, Family
from trtforge.models.formats import MIXED_FORMATS
from trtforge.plan.legality import Problem
from trtforge.plan.weights import RankWeights

PLAIN_BITS = 16.0
_FP8, _INT4 = 8.0, 4.0  # bits of a weight; INT4 without its groups' scales
_SCALE = 32.0  # bits of a scale in checkpoints


def bits_of(quant: QuantFormat, group_size: int) -> float:
    """Bits of a weight with its scales."""
    return {"int4_awq": _INT4 + _SCALE / group_size, "fp8": _FP8}.get(quant, PLAIN_BITS)


def other_formats(budget: float, group_size: int) -> float:
    """The largest share of weights that may get a format with more bits than the first of MIXED_FORMATS."""
    least, *more = (bits_of(quant, group_size) for quant in MIXED_FORMATS)
    return max(0.0, min(1.0, (budget - least) / (min(more) - least)))


def least_bits(whole: RankWeights, left: RankWeights, group_size: int) -> float:
    """Mean bits of a weight if all layers but the excluded ones get the first of MIXED_FORMATS.

    `whole`: the unsplit model; `left`: the same with the excluded layers unquantised.
    """
    every, formatted = (_formatted(weights) for weights in (whole, left))
    return (formatted * bits_of(MIXED_FORMATS[0], group_size) + (every - formatted) * PLAIN_BITS) / max(1, every)


def _formatted(weights: RankWeights) -> int:
    blocks = weights.blocks(Parallel(), 0)
    return sum(count * sum(m.weights for m in block.matrices if m.formatted) for block, count in blocks)


def budget_problems(budget: float, quant: str, least: float, pp: int, backend: Backend) -> Iterator[Problem]:
    """Problems of a recipe with a budget of bits. `least`: the fewest mean bits of a weight that are possible."""
    if quant != MIXED_FORMATS[0]:
        yield Problem(
            "budget",
            f"quantization.budget needs the format {MIXED_FORMATS[0]}, not {quant}",
            f"Use --set quantization.format={MIXED_FORMATS[0]}, or leave quantization.budget out.",
        )
    elif budget < least:
        yield Problem(
            "budget",
            f"a budget of {budget:g} bits is too small: with {MIXED_FORMATS[0]} wherever it is possible, a weight has "
            f"{least:.4g} bits",
            f"Use --set quantization.budget={ceil(100 * least) / 100:g}bits or more.",
        )
    if pp > 1:
        yield Problem(
            "budget",
            "quantization.budget with pipeline parallelism: TensorRT-LLM numbers the layers of each stage from 0",
            "Use --set parallel.pp=1, or leave quantization.budget out.",
        )
    if backend == "tensorrt_llm":
        yield Problem(
            "budget",
            "quantization.budget with engine.backend tensorrt_llm: no release is known to build such engines",
            "Use --set engine.backend=llmapi, or leave quantization.budget out.",
        )


def experts_problem(family: Family, facts: Facts) -> Problem | None:
    """The problem of a budget of bits for a model with experts, whose stacked weights have one format; None without
    experts."""
    if not facts.sparse_layers:
        return None
    return Problem(
        "budget",
        f"a budget of bits is not supported for {family.name} with experts: a stack of experts has one format",
        "Leave the budget out (quantization.budget in a recipe).",
    )
