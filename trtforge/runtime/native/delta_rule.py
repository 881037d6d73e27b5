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
    """Outputs (rows, heads, value size) of one token in each row; writes the new states to `after`.

    before, after: a contiguous state (heads, key size, value size) for each row; both may be the same tensor.
    """
    parts = _contiguous(parts)
    out = torch.empty_like(parts[2])
    sources, targets = (torch.tensor([state.data_ptr() for state in states]) for states in (before, after))
    places = {"from": sources.data_ptr(), "to": targets.data_ptr()}
    kernels.run("delta_tokens", DeltaTokens(**places, **_fields(parts, out), rows=len(before)))
    return out


def delta_sequence(kernels: Native, parts: Parts, before: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (tokens, heads, value size) of the tokens of one sequence, and the state after them.

    before: the state (heads, key size, value size).
    """
    parts, before = _contiguous(parts), before.contiguous()
    out, after = torch.empty_like(parts[2]), torch.empty_like(before)
    places = {"from": before.data_ptr(), "to": after.data_ptr()}
    kernels.run("delta_sequence", DeltaSequence(**places, **_fields(parts, out), tokens=len(out)))
    return out, after


def _contiguous(parts: Parts) -> Parts:
    queries, keys, values, rates, decays = (part.contiguous() for part in parts)
    return queries, keys, values, rates, decays


def _fields(parts: Parts, out: Tensor) -> dict[str, int]:
    """The fields that the kernels' structures share."""
    tensors = zip(("queries", "keys", "values", "rates", "decays", "out"), (*parts, out), strict=True)
    sizes = {"heads": out.shape[1], "key_size": parts[1].shape[2], "value_size": out.shape[2]}
    return {name: tensor.data_ptr() for name, tensor in tensors} | sizes
