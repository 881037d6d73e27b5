"""The gated delta rule for single tokens by the kernels (source/delta_rule.cpp)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.structures import DeltaTokens


def delta_tokens(
    kernels: Native,
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    before: Sequence[Tensor],
    after: Sequence[Tensor],
) -> Tensor:
    """One token of each row: (rows, heads, value size); `after` gets the states. All float32.

    parts: queries and keys (rows, heads, key size), values (rows, heads, value size), rates and log decays (rows,
    heads). before, after: contiguous states (heads, key size, value size) of each row, which may be the same.
    """
    queries, keys, values, rates, decays = (part.contiguous() for part in parts)
    out = torch.empty_like(values)
    sources, targets = (torch.tensor([state.data_ptr() for state in states]) for states in (before, after))
    given = DeltaTokens(
        **{"from": sources.data_ptr(), "to": targets.data_ptr()},
        queries=queries.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        rates=rates.data_ptr(),
        decays=decays.data_ptr(),
        out=out.data_ptr(),
        rows=len(before),
        heads=values.shape[1],
        key_size=keys.shape[2],
        value_size=values.shape[2],
    )
    kernels.run("delta_tokens", given)
    return out
