"""Triton kernels of attention for single-token rows over a paged KV cache, split over the context.

Online softmax: Milakov and Gimelshein 2018; splits of a long context that are combined afterwards: Flash-Decoding (Dao
et al. 2023). `PagedAttention` launches them.
"""

import triton
import triton.language as tl

from trtforge.runtime.cuda.step_kernels import wait_for_previous

_WIDENS = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter (3.9) multiplies the bits of bfloat16; products of the same numbers in float32 are exact."""


@triton.jit
def _product(left, right):
    """left x right, summed in float32; float32 itself is not rounded to TF32."""
    if _WIDENS:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _numbers(codes, E4M3: tl.constexpr, TYPE: tl.constexpr):
    """Cached values in the compute type, without their scale. E4M3 becomes float16 by its bits: exact on every GPU."""
    if E4M3:
        bits = codes.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half.to(tl.float32) * 256.0).to(TYPE)
    elif codes.dtype == tl.int8:
        return codes.to(tl.float32).to(TYPE)
    else:
        return codes


@triton.jit
def _first_seen(length, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that the last of `length` tokens attends to."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(first, length - WINDOW)
    if CHUNK > 0:
        first = tl.maximum(first, (length - 1) // CHUNK * CHUNK)
    return first


@triton.jit
def attend_paged(
    queries,
    cache,
    tables,
    lengths,
    slopes,
    sinks,
    out,
    sums,
    largest,
    totals,
    scale,
    cache_scale,
    cap,
    query_row,
    query_head,
    cache_block,
    cache_slot,
    cache_vector,
    table_row,
    table_column,
    out_row,
    VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    SINKS: tl.constexpr,
    E4M3: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, KV head, split): the query heads of a KV head over one part of the row's context.

    One split writes `out`; several write what `combine_splits` reads: sums (rows, heads, SPLITS, SIZE) of values,
    largest and totals (rows, heads, SPLITS). VALUES: from a key's vector to that of its value. WINDOW, CHUNK: or 0.
    """
    wait_for_previous(EARLY)
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kind: tl.constexpr = queries.dtype.element_ty
    groups, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, SIZE_PADDED)
    heads = kv_head * GROUP + groups
    own, inside = groups < GROUP, dims < SIZE
    query_at = row.to(tl.int64) * query_row + heads[:, None] * query_head + dims[None, :]
    query = tl.load(queries + query_at, mask=own[:, None] & inside[None, :], other=0.0)
    length = tl.load(lengths + row).to(tl.int32)
    first = _first_seen(length, WINDOW, CHUNK)
    part = (length - first + TOKENS * SPLITS - 1) // (TOKENS * SPLITS) * TOKENS
    begin = first + split * part
    end = tl.minimum(length, begin + part)
    most = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    found = tl.zeros([GROUP_PADDED, SIZE_PADDED], tl.float32)
    if BIASED:
        slope = tl.load(slopes + heads, mask=own, other=0.0)
    for start in range(begin, end, TOKENS):
        positions = start + tl.arange(0, TOKENS)
        seen = positions < end
        columns = (positions // BLOCK).to(tl.int64)
        blocks = tl.load(tables + row.to(tl.int64) * table_row + columns * table_column, mask=seen, other=0)
        keys_at = blocks * cache_block + (positions % BLOCK) * cache_slot + kv_head * cache_vector
        stored = seen[:, None] & inside[None, :]
        codes = tl.load(cache + keys_at[:, None] + dims[None, :], mask=stored, other=0)
        scores = _product(query, tl.trans(_numbers(codes, E4M3, kind))) * (scale * cache_scale)
        if CAPPED:
            scores = cap - 2 * cap / (tl.exp(2 * scores / cap) + 1)  # cap x tanh(scores / cap)
        if BIASED:
            scores += slope[:, None] * positions[None, :].to(tl.float32)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        kept = tl.exp(most - higher)
        total = total * kept + tl.sum(weights, 1)
        values = tl.load(cache + keys_at[:, None] + VALUES * cache_vector + dims[None, :], mask=stored, other=0)
        found = found * kept[:, None] + _product(weights.to(kind), _numbers(values, E4M3, kind))
        most = higher
    found = found * cache_scale
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks + heads, mask=own, other=0.0)
            higher = tl.maximum(most, sink)
            found = found * tl.exp(most - higher)[:, None]
            total = total * tl.exp(most - higher) + tl.exp(sink - higher)
        out_at = row.to(tl.int64) * out_row + heads[:, None] * SIZE + dims[None, :]
        tl.store(out + out_at, (found / total[:, None]).to(kind), mask=own[:, None] & inside[None, :])
    else:
        count = tl.num_programs(1) * GROUP
        at = (row.to(tl.int64) * count + heads) * SPLITS + split
        tl.store(largest + at, most, mask=own)
        tl.store(totals + at, total, mask=own)
        tl.store(sums + at[:, None] * SIZE + dims[None, :], found, mask=own[:, None] & inside[None, :])


@triton.jit
def combine_splits(
    sums,
    largest,
    totals,
    sinks,
    out,
    out_row,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, head): the output from what `attend_paged` found in each split. Empty splits count for nothing."""
    wait_for_previous(EARLY)
    row, head = tl.program_id(0), tl.program_id(1)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, SIZE_PADDED)
    at = (row.to(tl.int64) * tl.num_programs(1) + head) * SPLITS + splits
    inside = dims < SIZE
    most = tl.load(largest + at)
    higher = tl.max(most, 0)
    if SINKS:
        higher = tl.maximum(higher, tl.load(sinks + head))
    weights = tl.exp(most - higher)
    total = tl.sum(weights * tl.load(totals + at), 0)
    if SINKS:
        total += tl.exp(tl.load(sinks + head) - higher)
    parts = tl.load(sums + at[:, None] * SIZE + dims[None, :], mask=inside[None, :], other=0.0)
    found = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + row.to(tl.int64) * out_row + head * SIZE + dims, found.to(out.dtype.element_ty), mask=inside)
