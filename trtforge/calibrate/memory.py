"""How many bytes of hidden states fit in memory if the whole process must stay under a limit."""

from trtforge.calibrate.layer import Needs
from trtforge.core.dtypes import ModelDtype, dtype_named
from trtforge.core.errors import ForgeError
from trtforge.core.heap import keep_few_operations, return_large_blocks
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import QuantFormat
from trtforge.machine.usage import peak_memory
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.family import Facts, Family
from trtforge.plan.formats import WEIGHTS
from trtforge.plan.peaks import least_calibration
from trtforge.plan.weights import rank_weights


def hidden_budget(limit: int, family: Family, facts: Facts, dtype: ModelDtype, needs: Needs, quant: QuantFormat) -> int:
    """Bytes for hidden states if a calibration for `quant` that computes in `dtype` may use `limit` bytes in all.

    From now on, freed tensors go back to the system at once, and oneDNN keeps little. Raises ForgeError if one layer
    alone needs more.
    """
    return_large_blocks()
    keep_few_operations()
    whole = rank_weights(family, facts, Layout(Parallel(), dtype))
    itemsize = dtype_named(dtype).size
    needed = peak_memory() + least_calibration(
        family, facts, whole, itemsize, WEIGHTS[quant], compensated=needs.compensated
    )
    if needed > limit:
        raise ForgeError(
            f"--memory {limit:,} is too small: one layer at a time needs {needed:,} bytes",
            hint=f"Give at least {needed:,}; hidden states that do not fit go to disk.",
        )
    return limit - needed
