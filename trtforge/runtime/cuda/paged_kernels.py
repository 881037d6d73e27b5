"""The Triton kernel for attention of single-token rows over a paged KV cache, split over the context.

`PagedAttention` launches it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

from trtforge.runtime.cuda.softmax_kernels import (
    cached_numbers,
    changed,
    exact_product,
    of_all_parts,
    part_of,
    with_scores,
    with_sinks,
)
from trtforge.runtime.cuda.step_kernels import as_cached, as_stored, turned


@triton.jit
def _cache_last(key, value_at, cell, to_value, dims, inside, scale, E4M3: tl.constexpr):
    """Store a token's key at `cell` in the cache, and its value `to_value` elements after it."""
    int8: tl.constexpr = cell.dtype.element_ty == tl.int8
    value = tl.load(value_at + dims, mask=inside, other=0.0)
    tl.store(cell + dims, as_cached(key, scale, int8, E4M3), mask=inside)
    tl.store(cell + to_value + dims, as_cached(value, scale, int8, E4M3), mask=inside)


@triton.jit
def _shown(bits, before, seen):
    """Which of the `seen` slots, `before` slots before its own, a row of a draft tree sees, from its `seen_slots`."""
    place = 63 - tl.minimum(tl.maximum(before, 0), 63)  # slots after its own are not `seen`, but shifted too
    return seen & ((before >= 64) | ((tl.load(bits) >> place) & 1 == 1))


@triton.jit
def attend_paged(
    queries,
    cache,
    tables,
    lengths,
    slopes,
    sinks,
    seen_slots,
    out,
    sums,
    largest,
    totals,
    arrived,
    code_scale,
    cosines,
    sines,
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
    TREES: tl.constexpr,
    E4M3: tl.constexpr,
    DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, KV head, split): the query heads of a KV head attend to one part of the row's context.

    With several parts, up to SPLITS, each program writes sums (rows, heads, SPLITS, SIZE), largest scores and totals
    (rows, heads, SPLITS); the last one to arrive combines them and resets `arrived` (rows x KV heads) to zero. VALUES:
    vectors from a key to its value. WINDOW, CHUNK: 0 for none. `code_scale`: see `as_stored`. DIM: 0, or the number of
    elements of queries and new keys to rotate first, see `rotate`; the row's new key and value, after the queries, are
    then cached. TREES: rows see `seen_slots` (rows,). Tables and lengths, never written, are read before waiting.
    """
    if EARLY:
        gdc_launch_dependents()
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kind: tl.constexpr = queries.dtype.element_ty
    groups, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, SIZE_PADDED)
    heads, own, inside = kv_head * GROUP + groups, groups < GROUP, dims < SIZE
    known, vectors, kv_heads = own[:, None] & inside[None, :], queries + row * query_row, tl.num_programs(1)
    query_at, length = vectors + heads[:, None] * query_head, tl.load(lengths + row).to(tl.int32)
    begin, end, parts = part_of(length - 1, length - 1, split, TOKENS, SPLITS, WINDOW, CHUNK)
    if begin >= end:  # returns without waiting; never the first split, as there is at least one token
        return
    positions, table = begin + tl.arange(0, TOKENS), tables + row * table_row
    blocks = tl.load(table + (positions // BLOCK).to(tl.int64) * table_column, mask=positions < end, other=0)
    if EARLY:
        gdc_wait()
    if DIM > 0:
        cosines, sines = cosines + row * DIM, sines + row * DIM
        query = turned(query_at, dims[None, :], known, known & (dims < DIM)[None, :], cosines, sines, DIM, INTERLEAVED)
        if end == length:
            key_at = vectors + (kv_heads * GROUP + kv_head) * query_head
            block = tl.load(table + ((length - 1) // BLOCK).to(tl.int64) * table_column)
            cell = cache + block * cache_block + (length - 1) % BLOCK * cache_slot + kv_head * cache_vector
            key = turned(key_at, dims, inside, dims < DIM, cosines, sines, DIM, INTERLEAVED)
            value_at = key_at + kv_heads * query_head
            _cache_last(key, value_at, cell, VALUES * cache_vector, dims, inside, cache_scale, E4M3)
        tl.debug_barrier()  # this program reads the stored key and value
    else:
        query = tl.load(query_at + dims[None, :], mask=known, other=0.0)
    most, total = tl.full([GROUP_PADDED], float("-inf"), tl.float32), tl.zeros([GROUP_PADDED], tl.float32)
    found = tl.zeros([GROUP_PADDED, SIZE_PADDED], tl.float32)
    for start in range(begin, end, TOKENS):
        positions = start + tl.arange(0, TOKENS)
        seen, following = positions < end, positions + TOKENS
        seen = _shown(seen_slots + row, length - 1 - positions, seen) if TREES else seen
        keys_at = blocks * cache_block + (positions % BLOCK) * cache_slot + kv_head * cache_vector
        stored = seen[:, None] & inside[None, :]
        codes = tl.load(cache + keys_at[:, None] + dims[None, :], mask=stored, other=0)
        values = tl.load(cache + keys_at[:, None] + VALUES * cache_vector + dims[None, :], mask=stored, other=0)
        blocks = tl.load(table + (following // BLOCK).to(tl.int64) * table_column, mask=following < end, other=0)
        scores = exact_product(query, tl.trans(cached_numbers(codes, E4M3, kind))) * (scale * cache_scale)
        scores = changed(scores, heads, own, positions, seen[None, :], slopes, cap, CAPPED, BIASED)
        most, total, found = with_scores(scores, cached_numbers(values, E4M3, kind), most, total, found, TREES)
    at, counter = (row * kv_heads * GROUP + heads) * SPLITS, arrived + row * kv_heads + kv_head
    last, most, total, found = of_all_parts(
        sums, largest, totals, counter, at, split, parts, own, known, dims, most, total, found, SIZE, SPLITS
    )
    if last:
        found = found * cache_scale
        if SINKS:
            found, total = with_sinks(most, total, found, tl.load(sinks + heads, mask=own, other=0.0))
        out_at = out + row * out_row + heads[:, None] * SIZE + dims[None, :]
        tl.store(out_at, as_stored(found / total[:, None], out, code_scale, kind), mask=known)
