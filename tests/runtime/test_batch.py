from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from trtforge.runtime.architecture.positions import Reach
from trtforge.runtime.decoder.attention import Attention
from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.kv_cache import LayerCache, Scratch
from trtforge.runtime.decoder.padding import buckets, padded_rows
from trtforge.runtime.decoder.scores import FusedScores
from trtforge.runtime.ranks.block_contents import BlockContents
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.step_codec import asked_block, decode, encode, encode_question

BLOCK = 4


def step_of(rows: list[tuple[int, int]], wanted: list[int] | None = None) -> Step:
    """A step of (start, count) rows with blocks of their own."""
    held = [-(-(start + count) // BLOCK) for start, count in rows]
    tables = np.zeros((len(rows), max(held)), dtype=np.int64)
    free = iter(np.random.default_rng(0).permutation(sum(held)))
    for index, number in enumerate(held):
        tables[index, :number] = [next(free) for _ in range(number)]
    starts, counts = (np.array(values, dtype=np.int64) for values in zip(*rows, strict=True))
    total = int(counts.sum())
    return Step(starts, counts, np.array(wanted or [1] * len(rows)), tables, np.arange(total) + 100)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=12))
def test_a_step_survives_encoding(rows: list[tuple[int, int]]) -> None:
    step = replace(step_of(rows), candidates=3, draws=np.arange(len(rows) * 2) - 5)
    step = replace(step, filled=np.arange(2), contents=np.arange(-3, 3).reshape(2, 3))
    encoded = encode(step)
    decoded = decode(np.concatenate([encoded, np.zeros(5, dtype=np.int64)]))
    assert encoded[0] == len(encoded)
    for name in ("starts", "counts", "wanted", "tables", "tokens", "candidates", "draws", "filled", "contents"):
        assert np.array_equal(getattr(decoded, name), getattr(step, name))


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    blocks=st.sets(st.integers(0, 9), min_size=1),
    data=st.data(),
)
def test_contents_of_blocks_reach_each_rank(sizes: list[int], blocks: set[int], data: st.DataObject) -> None:
    contents = BlockContents(sizes)
    given_bytes = st.binary(min_size=sum(sizes), max_size=sum(sizes))
    fills = {block: torch.frombuffer(bytearray(data.draw(given_bytes)), dtype=torch.uint8) for block in blocks}
    step = decode(encode(contents.with_fills(step_of([(0, 1)]), fills)))
    found = [contents.fills(step, index) for index in range(len(sizes))]
    assert [[len(part) for part in rank.values()] for rank in found] == [[size] * len(blocks) for size in sizes]
    for block, content in fills.items():
        assert torch.cat([rank[block] for rank in found]).equal(content)


def test_a_step_without_contents_brings_none() -> None:
    assert BlockContents([8, 8]).fills(decode(encode(step_of([(0, 1)]))), 1) == {}
    assert [asked_block(encode_question(7)), asked_block(encode(step_of([(0, 1)])))] == [7, None]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=12))
def test_every_token_goes_to_its_own_slot(rows: list[tuple[int, int]]) -> None:
    step = step_of(rows)
    slots = step.slots(*step.positions(), BLOCK)
    assert len(set(slots.tolist())) == len(step.tokens)
    expected = [
        step.tables[row, position // BLOCK] * BLOCK + position % BLOCK
        for row, (start, count) in enumerate(rows)
        for position in range(start, start + count)
    ]
    assert slots.tolist() == expected


def test_logits_are_wanted_of_the_last_positions_of_a_row() -> None:
    assert step_of([(3, 1), (0, 4), (0, 3)], [1, 0, 2]).logit_rows().tolist() == [0, 6, 7]


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40).map(sorted))
def test_buckets_cover_all_rows_and_bound_the_padding(blocks: list[int]) -> None:
    ranges = buckets(np.array(blocks))
    assert [first for first, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == len(blocks)
    for first, end in ranges:
        for cut in range(first + 1, end):
            assert (cut - first) * (blocks[end - 1] - blocks[cut - 1]) < 48


def test_padded_row_counts_are_few_and_waste_little() -> None:
    counts = [padded_rows(rows) for rows in range(1, 4097)]
    assert all(count >= rows for rows, count in enumerate(counts, start=1))
    assert len(set(counts)) < 40
    assert max(count / rows for rows, count in enumerate(counts, start=1) if rows > 256) < 1.5


@pytest.mark.parametrize("reach", [Reach(), Reach(window=6), Reach(chunk=4)])
@pytest.mark.parametrize("scale", [None, 0.02])
@pytest.mark.parametrize("pads", [False, True])
def test_paged_attention_equals_plain_attention(reach: Reach, scale: float | None, pads: bool) -> None:
    """Rows of one token, a whole prompt and a chunk that continues one, against one dense attention per row."""
    torch.manual_seed(0)
    heads, kv_heads, size = 4, 2, 8
    rows = [(5, 1), (9, 1), (70, 1), (0, 7), (6, 5)]
    step = step_of(rows)
    slots = int(step.tables.max() + 1)
    storage = torch.zeros(slots, BLOCK, 2 * kv_heads, size, dtype=torch.float32 if scale is None else torch.uint8)
    cache = LayerCache(storage, scale, torch.float32, Scratch())
    full = [torch.randn(start + count, heads + 2 * kv_heads, size) for start, count in rows]
    for row, (start, _) in enumerate(rows):
        if start:
            positions = np.arange(start)
            where = step.tables[row, positions // BLOCK] * BLOCK + positions % BLOCK
            cache.write(torch.from_numpy(where), full[row][:start, heads:])
    batch = Batch.of(step, BLOCK, torch.device("cpu"), torch.float32, reaches=(Reach(), reach), pads=pads)
    packed = torch.cat([full[row][start:] for row, (start, _) in enumerate(rows)])
    padding = torch.full((len(batch.tokens) - len(packed), *packed.shape[1:]), float("nan"))
    made = Attention(heads, kv_heads, size, FusedScores(size**-0.5), reach)(torch.cat((packed, padding)), batch, cache)
    assert len(made) == (16 if pads else 15)
    assert not made[15:].any()
    expected = []
    for row, (start, count) in enumerate(rows):
        query, key, value = full[row].transpose(0, 1).split([heads, kv_heads, kv_heads])
        if scale is not None:
            key, value = ((t / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale for t in (key, value))
        positions = torch.arange(start + count)
        distance = positions.unsqueeze(1) - positions
        seen = (distance >= 0) & (distance < (reach.window or 1000))
        if reach.chunk:
            seen &= positions.unsqueeze(1) // reach.chunk == positions // reach.chunk
        key, value = key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        expected.append(out[:, start:].transpose(0, 1).reshape(count, -1))
    torch.testing.assert_close(made[:15], torch.cat(expected), rtol=1e-5, atol=1e-5)
