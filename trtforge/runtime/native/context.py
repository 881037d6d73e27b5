"""Attention of many query tokens of one sequence, by the kernels (source/context.cpp)."""

import torch
from torch import Tensor

from trtforge.runtime.native.bindings import CACHES, TYPES, Native, PagedHeads, numbers_of
from trtforge.runtime.native.structures import Context
from trtforge.runtime.native.tiles import TILE

_KEYS = 64  # in a block
_QUERIES = 64  # with more query tokens, all keys and values are packed in memory first
_MOST_SIZE = 256  # elements of a head


def attends_context(how: PagedHeads) -> bool:
    """Whether `attend_context` supports these heads."""
    return how.size % TILE == 0 and how.size <= _MOST_SIZE and how.vectors == 2 * how.kv_heads


def attend_context(
    kernels: Native,
    queries: Tensor,
    start: int,
    table: Tensor,
    storage: Tensor,
    cache_scale: float,
    how: PagedHeads,
    out: Tensor,
) -> None:
    """Causal attention of a sequence's tokens from position `start` on.

    queries (tokens, heads or more, size), out (tokens, heads x size); table: int64 block numbers.
    """
    count = len(queries)
    of_window, of_chunk = (start - how.window + 1 if how.window else 0), (start - start % how.chunk if how.chunk else 0)
    first = max(0, of_window, of_chunk)  # like `first_seen` of source/common.h
    blocks = -(-(start + count) // _KEYS) - first // _KEYS
    packed = None
    if count > _QUERIES:
        by_pairs = kernels.multiplies and queries.dtype is torch.bfloat16
        dtype = torch.bfloat16 if by_pairs else torch.float32
        packed = queries.new_empty(blocks * _KEYS * 2 * how.kv_heads * how.size, dtype=dtype)
    given = Context(
        queries=queries.data_ptr(),
        cache=storage.data_ptr(),
        out=out.data_ptr(),
        table=table.data_ptr(),
        packed=None if packed is None else packed.data_ptr(),
        count=count,
        start=start,
        block=storage.shape[1],
        stride=queries.stride(0),
        cache_scale=cache_scale,
        **numbers_of(how),
    )
    kernels.run("context_attention", TYPES[queries.dtype], CACHES[storage.dtype], given)
