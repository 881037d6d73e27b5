"""The gated delta rule by the kernels (source/delta_rule.cpp). All tensors are float32."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.structures import DeltaSequence, DeltaTokens

Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Queries and keys (tokens, heads, key size), values (tokens, heads, value size), rates and log decays (tokens, heads).
"""


def delta_tokens(
    kernels: Native,
    parts: Parts,
    before: Sequence[Tensor],
    after: Sequence[Tensor],
) -> Tensor:
    """One token of each row: (rows, heads, value size); `after` gets the states.

    before, after: contiguous states (heads, key size, value size) of each row, which may be the same.
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


def delta_sequence(kernels: Native, parts: Parts, before: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of one sequence: (tokens, heads, value size), and the state after them.

    before: the state (heads, key size, value size).
    """
    queries, keys, values, rates, decays = (part.contiguous() for part in parts)
    out, before = torch.empty_like(values), before.contiguous()
    after = torch.empty_like(before)
    given = DeltaSequence(
        **{"from": before.data_ptr(), "to": after.data_ptr()},
        queries=queries.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        rates=rates.data_ptr(),
        decays=decays.data_ptr(),
        out=out.data_ptr(),
        tokens=len(values),
        heads=values.shape[1],
        key_size=keys.shape[2],
        value_size=values.shape[2],
    )
    kernels.run("delta_sequence", given)
    return out, after
