"""How many bytes of hidden states may stay in memory, so that the whole process stays under a limit."""

from trtforge.core.dtypes import ModelDtype, dtype_named
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import QuantFormat
from trtforge.machine.usage import peak_memory
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.family import Facts, Family
from trtforge.plan.formats import WEIGHTS
from trtforge.plan.peaks import least_calibration
from trtforge.plan.weights import rank_weights


def hidden_budget(limit: int, family: Family, facts: Facts, dtype: ModelDtype, quant: QuantFormat) -> int:
    """Bytes of hidden states under `limit` bytes for the process, of a calibration to `quant` that computes in `dtype`.

    Raises ForgeError where a layer alone needs more.
    """
    whole = rank_weights(family, facts, Layout(Parallel(), dtype))
    needed = peak_memory() + least_calibration(family, facts, whole, dtype_named(dtype).size, WEIGHTS[quant])
    if needed > limit:
        raise ForgeError(
            f"--memory {limit:,}: one layer at a time needs {needed:,} bytes",
            hint=f"Give at least {needed:,}; hidden states go to disk beyond that.",
        )
    return limit - needed
