"""How many bytes of hidden states may stay in memory, so that the whole process stays under a limit."""

import torch

from trtforge.core.errors import ForgeError
from trtforge.core.usage import peak_memory
from trtforge.formats.hf import HfCheckpoint
from trtforge.models.family import Facts, Family
from trtforge.plan.peaks import layer_working_set


def hidden_budget(limit: int, checkpoint: HfCheckpoint, family: Family, facts: Facts, dtype: torch.dtype) -> int:
    """Bytes of hidden states under `limit` bytes for the process. Raises ForgeError where a layer alone needs more."""
    layer = largest_layer(checkpoint, family, facts) * dtype.itemsize
    needed = peak_memory() + layer_working_set(layer)
    if needed > limit:
        raise ForgeError(
            f"--memory {limit:,}: one layer at a time needs {needed:,} bytes",
            hint=f"Give at least {needed:,}; hidden states go to disk beyond that.",
        )
    return limit - needed


def largest_layer(checkpoint: HfCheckpoint, family: Family, facts: Facts) -> int:
    """Elements of the largest decoder layer."""
    totals = [0] * facts.sizes.num_layers
    for name, stored in checkpoint.tensors.items():
        rest = name.removeprefix(f"{family.layer_prefix}.")
        index = rest.split(".", 1)[0]
        if rest != name and index.isdigit():
            totals[int(index)] += stored.spec.nbytes // stored.spec.dtype.size
    return max(totals)
