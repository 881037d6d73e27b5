"""How many bytes of hidden states fit in memory if the whole process must stay under a limit."""

from trtforge.calibrate.layer import Needs
from trtforge.core.dtypes import FLOAT32_BYTES, ModelDtype, dtype_named
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import QuantFormat
from trtforge.machine.usage import peak_memory
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.family import Facts, Family
from trtforge.plan.formats import WEIGHTS
from trtforge.plan.peaks import least_calibration
from trtforge.plan.weights import rank_weights

_COPIES = 4  # of the largest Gram matrix and of the largest weights, while these are rounded with compensation


def hidden_budget(limit: int, family: Family, facts: Facts, dtype: ModelDtype, needs: Needs, quant: QuantFormat) -> int:
    """Bytes for hidden states if a calibration for `quant` that computes in `dtype` may use `limit` bytes in all.

    Raises ForgeError if one layer alone needs more.
    """
    whole = rank_weights(family, facts, Layout(Parallel(), dtype))
    needed = peak_memory() + least_calibration(family, facts, whole, dtype_named(dtype).size, WEIGHTS[quant])
    if needs.compensated:
        needed += _compensation_work(family, facts)
    if needed > limit:
        raise ForgeError(
            f"--memory {limit:,} is too small: one layer at a time needs {needed:,} bytes",
            hint=f"Give at least {needed:,}; hidden states that do not fit go to disk.",
        )
    return limit - needed


def _compensation_work(family: Family, facts: Facts) -> int:
    """Bytes that compensated rounding takes in addition to AWQ's search: float32 Gram matrices of a layer's inputs, the
    largest one's factor, and the weights that read it."""
    sizes = facts.sizes
    leaders = [row for row in family.linears if row.shares_input is None]
    widths = [sizes.of(row.inputs) for row in leaders]
    weights = [
        sizes.of(leader.inputs) * sizes.of(part.out)
        for leader in leaders
        for row in family.linears
        if leader.target in (row.target, row.shares_input)
        for part in row.parts
    ]
    for row in family.experts:
        widths += [sizes.of(row.inputs)] * sizes.of("experts")
        weights += [sizes.of(row.inputs) * sum(sizes.of(part.out) for part in row.parts)]
    grams = sum(width * width for width in widths)
    return FLOAT32_BYTES * (grams + _COPIES * (max(widths) ** 2 + max(weights, default=0)))
