"""The Triton kernel of attention for single-token rows over a paged KV cache, split over the context.

Online softmax: Milakov and Gimelshein 2018; splits of a long context that are combined afterwards: Flash-Decoding (Dao
et al. 2023). `PagedAttention` launches it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

from trtforge.runtime.cuda.number_kernels import INTERPRETED, numbers_of_e4m3
from trtforge.runtime.cuda.step_kernels import as_cached, as_stored, turned


@triton.jit
def _product(left, right):
    """left x right, summed in float32; float32 itself is not rounded to TF32."""
    if INTERPRETED:  # see `number_kernels.product`
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _numbers(codes, E4M3: tl.constexpr, TYPE: tl.constexpr):
    """Cached values in the compute type, without their scale."""
    if E4M3:
        return numbers_of_e4m3(codes).to(TYPE)
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
def _part_of(length, split, TOKENS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The positions that a split attends to, from the first one to before the second one; and how many splits do."""
    first = _first_seen(length, WINDOW, CHUNK)
    part = tl.cdiv(length - first, TOKENS * SPLITS) * TOKENS
    return first + split * part, tl.minimum(length, first + (split + 1) * part), tl.cdiv(length - first, part)


@triton.jit
def _keep(sums, largest, totals, at, own, known, dims, most, total, found, SIZE: tl.constexpr):
    """Store what a split found, for the program that combines them."""
    tl.store(largest + at, most, mask=own)
    tl.store(totals + at, total, mask=own)
    tl.store(sums + at[:, None] * SIZE + dims[None, :], found, mask=known)
    tl.debug_barrier()


@triton.jit
def _combined(sums, largest, totals, first_part, count, own, known, dims, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """The largest score, the total and the sums of `count` splits, of which other programs wrote most."""
    splits = tl.arange(0, SPLITS)[None, :]
    parts, kept = first_part[:, None] + splits, own[:, None] & (splits < count)
    each = tl.load(largest + parts, mask=kept, other=float("-inf"), cache_modifier=".cg")
    most = tl.where(own, tl.max(each, 1), 0.0)
    of_each = tl.load(totals + parts, mask=kept, other=0.0, cache_modifier=".cg")
    total = tl.sum(of_each * tl.exp(each - most[:, None]), 1)
    found = tl.zeros([known.shape[0], known.shape[1]], tl.float32)
    for other in tl.static_range(SPLITS):
        at = first_part + other
        wrote = at < first_part + count
        highest = tl.load(largest + at, mask=own & wrote, other=float("-inf"), cache_modifier=".cg")
        sums_at = sums + at[:, None] * SIZE + dims[None, :]
        of_other = tl.load(sums_at, mask=known & wrote[:, None], other=0.0, cache_modifier=".cg")
        found += tl.exp(highest - most)[:, None] * of_other
    return most, total, found


@triton.jit
def _of_all_parts(
    sums,
    largest,
    totals,
    counter,
    first_part,
    split,
    count,
    own,
    known,
    dims,
    most,
    total,
    found,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Whether this program is the last one of `count` parts; what all of them found, if it is."""
    last = True
    if SPLITS > 1 and count > 1:
        _keep(sums, largest, totals, first_part + split, own, known, dims, most, total, found, SIZE)
        last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
        if last:
            tl.store(counter, 0)
            most, total, found = _combined(sums, largest, totals, first_part, count, own, known, dims, SIZE, SPLITS)
    return last, most, total, found


@triton.jit
def _with_sinks(most, total, found, sinks):
    """The sums and the total with a logit beside the scores, whose value is zero."""
    higher = tl.maximum(most, sinks)
    return found * tl.exp(most - higher)[:, None], total * tl.exp(most - higher) + tl.exp(sinks - higher)


@triton.jit
def _cache_last(key, value_at, cell, to_value, dims, inside, scale, E4M3: tl.constexpr):
    """Store a token's key and its value in the cache, the value `to_value` further."""
    int8: tl.constexpr = cell.dtype.element_ty == tl.int8
    value = tl.load(value_at + dims, mask=inside, other=0.0)
    tl.store(cell + dims, as_cached(key, scale, int8, E4M3), mask=inside)
    tl.store(cell + to_value + dims, as_cached(value, scale, int8, E4M3), mask=inside)


@triton.jit
def _changed(scores, heads, own, positions, seen, slopes, cap, CAPPED: tl.constexpr, BIASED: tl.constexpr):
    """Scores (heads, positions) as a model changes them before the softmax, of the positions that are `seen`."""
    if CAPPED:
        scores = cap - 2 * cap / (tl.exp(2 * scores / cap) + 1)  # cap x tanh(scores / cap)
    if BIASED:
        scores += tl.load(slopes + heads, mask=own, other=0.0)[:, None] * positions[None, :].to(tl.float32)
    return tl.where(seen[None, :], scores, float("-inf"))


@triton.jit
def _with_scores(scores, values, most, total, found):
    """The largest score, the total and the sums with those of more positions."""
    higher = tl.maximum(most, tl.max(scores, 1))
    weights, kept = tl.exp(scores - higher[:, None]), tl.exp(most - higher)
    total = total * kept + tl.sum(weights, 1)
    return higher, total, found * kept[:, None] + _product(weights.to(values.dtype), values)


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
    E4M3: tl.constexpr,
    DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, KV head, split): the query heads of a KV head over one part of the row's context.

    Of several parts, up to SPLITS, each writes sums (rows, heads, SPLITS, SIZE) of values, largest and totals (rows,
    heads, SPLITS), and the one that arrives last makes the output of them; it leaves `arrived` (rows x KV heads) zero.
    VALUES: from a key's vector to that of its value. WINDOW, CHUNK: or 0. See `as_stored`. DIM: 0, or elements that are
    rotated first, see `rotate`, of queries and keys; the last key and value, which follow the queries, are then cached.
    No kernel writes tables and lengths, a step's inputs: they are read before the previous kernel has ended.
    """
    if EARLY:
        gdc_launch_dependents()
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kind: tl.constexpr = queries.dtype.element_ty
    groups, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, SIZE_PADDED)
    heads, own, inside = kv_head * GROUP + groups, groups < GROUP, dims < SIZE
    known = own[:, None] & inside[None, :]
    vectors, kv_heads = queries + row * query_row, tl.num_programs(1)
    query_at, length = vectors + heads[:, None] * query_head, tl.load(lengths + row).to(tl.int32)
    begin, end, parts = _part_of(length, split, TOKENS, SPLITS, WINDOW, CHUNK)
    if begin >= end:  # never in the first split, which waits: there is a token
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
        tl.debug_barrier()  # what is stored, this program reads
    else:
        query = tl.load(query_at + dims[None, :], mask=known, other=0.0)
    most, total = tl.full([GROUP_PADDED], float("-inf"), tl.float32), tl.zeros([GROUP_PADDED], tl.float32)
    found = tl.zeros([GROUP_PADDED, SIZE_PADDED], tl.float32)
    for start in range(begin, end, TOKENS):
        positions = start + tl.arange(0, TOKENS)
        seen, following = positions < end, positions + TOKENS
        keys_at = blocks * cache_block + (positions % BLOCK) * cache_slot + kv_head * cache_vector
        stored = seen[:, None] & inside[None, :]
        codes = tl.load(cache + keys_at[:, None] + dims[None, :], mask=stored, other=0)
        values = tl.load(cache + keys_at[:, None] + VALUES * cache_vector + dims[None, :], mask=stored, other=0)
        blocks = tl.load(table + (following // BLOCK).to(tl.int64) * table_column, mask=following < end, other=0)
        scores = _product(query, tl.trans(_numbers(codes, E4M3, kind))) * (scale * cache_scale)
        scores = _changed(scores, heads, own, positions, seen, slopes, cap, CAPPED, BIASED)
        most, total, found = _with_scores(scores, _numbers(values, E4M3, kind), most, total, found)
    at, counter = (row * kv_heads * GROUP + heads) * SPLITS, arrived + row * kv_heads + kv_head
    last, most, total, found = _of_all_parts(
        sums, largest, totals, counter, at, split, parts, own, known, dims, most, total, found, SIZE, SPLITS
    )
    if last:
        found = found * cache_scale
        if SINKS:
            found, total = _with_sinks(most, total, found, tl.load(sinks + heads, mask=own, other=0.0))
        out_at = out + row * out_row + heads[:, None] * SIZE + dims[None, :]
        tl.store(out_at, as_stored(found / total[:, None], out, code_scale, kind), mask=known)
