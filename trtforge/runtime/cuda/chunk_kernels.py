"""The Triton kernel for attention of chunks of sequences over a paged KV cache, in tiles of queries.

It uses the tiling of FlashAttention-2 (Dao 2023), and reads keys and values from the sequence's blocks, like vLLM's
kernel for prefixes (Kwon et al. 2023). `PagedAttention` launches it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

from trtforge.runtime.cuda.softmax_kernels import (
    cached_numbers,
    changed,
    exact_product,
    first_seen,
    of_all_parts,
    part_of,
    with_scores,
    with_sinks,
)
from trtforge.runtime.cuda.step_kernels import as_stored


@triton.jit
def _tile_of(rows, tiles, tile):
    """A tile's sequence and first token in it; the sequence's first token in the step, its position and token count."""
    row, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1).to(tl.int32)
    token, start = tl.load(rows + 3 * row), tl.load(rows + 3 * row + 1).to(tl.int32)
    return row, first, token, start, tl.load(rows + 3 * row + 2).to(tl.int32)


@triton.jit
def _seen_by_all(first, last, begin, end, TOKENS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The part of [begin, end), in whole tiles, that all queries from position `first` to `last` attend to."""
    whole = begin
    if WINDOW + CHUNK > 0:
        whole += tl.cdiv(tl.maximum(first_seen(last, WINDOW, CHUNK) - begin, 0), TOKENS) * TOKENS
        whole = tl.minimum(whole, end)
    before = tl.minimum(first + 1, end)
    return whole, whole + tl.maximum(before - whole, 0) // TOKENS * TOKENS


@triton.jit
def _with_tiles(
    begin,
    end,
    most,
    total,
    found,
    query,
    placed,
    own,
    cache,
    table,
    slopes,
    scale,
    cap,
    cache_block,
    cache_slot,
    to_value,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax (`with_scores`) over the positions from `begin` to `end`; without MASKED all queries see them all.

    `placed`: positions of the queries; `cache` points to the KV head, `slopes` to the head.
    """
    kind: tl.constexpr = query.dtype
    e4m3: tl.constexpr = cache.dtype.element_ty == tl.uint8
    dims = tl.arange(0, query.shape[1])
    positions = begin + tl.arange(0, TOKENS)
    blocks = tl.load(table + positions // BLOCK, mask=positions < end, other=0)
    for start in range(begin, end, TOKENS):
        positions = start + tl.arange(0, TOKENS)
        following = positions + TOKENS
        keys_at = blocks * cache_block + (positions % BLOCK) * cache_slot
        stored = (positions < end)[:, None] & (dims < SIZE)[None, :]
        codes = tl.load(cache + keys_at[:, None] + dims[None, :], mask=stored, other=0)
        values = tl.load(cache + to_value + keys_at[:, None] + dims[None, :], mask=stored, other=0)
        blocks = tl.load(table + following // BLOCK, mask=following < end, other=0)
        scores = exact_product(query, tl.trans(cached_numbers(codes, e4m3, kind))) * scale
        seen = (positions < end)[None, :]
        if MASKED:
            seen = seen & (positions[None, :] <= placed[:, None])
            seen = seen & (positions[None, :] >= first_seen(placed, WINDOW, CHUNK)[:, None])
        scores = changed(scores, placed * 0, own, positions, seen, slopes, cap, CAPPED, BIASED)
        most, total, found = with_scores(scores, cached_numbers(values, e4m3, kind), most, total, found, MASKED)
    return most, total, found


@triton.jit
def attend_chunks(
    queries,
    cache,
    rows,
    tables,
    tiles,
    slopes,
    sinks,
    out,
    sums,
    largest,
    totals,
    arrived,
    scale,
    cache_scale,
    cap,
    query_row,
    query_head,
    cache_block,
    cache_slot,
    cache_vector,
    table_row,
    out_row,
    VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (head, tile, split): up to QUERIES tokens of a sequence attend to one part of their context.

    rows (sequences, 3): a sequence's first token in the step, its position, and the number of tokens. tiles (tiles, 2):
    a sequence and the tile's first token, maybe after its end. Constants and parts: see `attend_paged`.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    head, heads, tile, split = tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.program_id(2)
    row, first, token, start, count = _tile_of(rows, tiles, tile)
    numbers, dims = first + tl.arange(0, QUERIES), tl.arange(0, SIZE_PADDED)
    own, placed, at = numbers < count, start + numbers, token + numbers
    known = own[:, None] & (dims < SIZE)[None, :]
    last = start + tl.minimum(count, first + QUERIES) - 1
    begin, end, parts = part_of(start + first, last, split, TOKENS, SPLITS, WINDOW, CHUNK)
    if (begin >= end) | (first >= count):
        return
    query = tl.load(queries + at[:, None] * query_row + head * query_head + dims[None, :], mask=known, other=0.0)
    most, total = tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, SIZE_PADDED], tl.float32)
    whole, beyond = _seen_by_all(start + first, last, begin, end, TOKENS, WINDOW, CHUNK)
    cache, table = cache + (head // GROUP) * cache_vector, tables + row * table_row
    for side in tl.static_range(3):
        if side != 0 or WINDOW + CHUNK > 0:
            most, total, found = _with_tiles(
                begin if side == 0 else whole if side == 1 else beyond,
                whole if side == 0 else beyond if side == 1 else end,
                most,
                total,
                found,
                query,
                placed,
                own,
                cache,
                table,
                slopes + head,
                scale * cache_scale,
                cap,
                cache_block,
                cache_slot,
                VALUES * cache_vector,
                SIZE,
                BLOCK,
                TOKENS,
                WINDOW,
                CHUNK,
                CAPPED,
                BIASED,
                side != 1,
            )
    first_part, counter = (at * heads + head) * SPLITS, arrived + tile * heads + head
    done, most, total, found = of_all_parts(
        sums, largest, totals, counter, first_part, split, parts, own, known, dims, most, total, found, SIZE, SPLITS
    )
    if done:
        found = found * cache_scale
        if SINKS:
            found, total = with_sinks(most, total, found, tl.load(sinks + head + placed * 0, mask=own, other=0.0))
        out_at = out + at[:, None] * out_row + head * SIZE + dims[None, :]
        tl.store(out_at, as_stored(found / total[:, None], out, out, queries.dtype.element_ty), mask=known)
