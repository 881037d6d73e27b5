"""Context attention by the CPU kernels against the softmax of all scores in float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.kernel_levels import LEVELS, kernels_at
from trtforge.runtime.decoder.alibi import Alibi
from trtforge.runtime.decoder.kv_cache import LayerCache, Scratch, storage_dtype
from trtforge.runtime.native.bindings import PagedHeads, PagedRows
from trtforge.runtime.native.context import attend_context, attends_context


def expected(queries: Tensor, cached: Tensor, start: int, how: PagedHeads) -> Tensor:
    """(tokens, heads x size) of queries (tokens, heads, size) and cached (keys, 2 x kv_heads, size), float32."""
    count, keys, group = len(queries), len(cached), how.heads // how.kv_heads
    of_keys, of_values = (part.repeat_interleave(group, 1) for part in cached.chunk(2, 1))
    scores = torch.einsum("qhd,khd->hqk", queries, of_keys) * how.scale
    if how.cap is not None:
        scores = how.cap * torch.tanh(scores / how.cap)
    if how.slopes is not None:
        scores += how.slopes.view(-1, 1, 1) * torch.arange(keys)
    positions = torch.arange(start, start + count).unsqueeze(1)
    behind = positions - torch.arange(keys)
    hidden = (behind < 0) | (behind >= (how.window or keys)) | (behind > positions % (how.chunk or keys))
    sinks = torch.full((how.heads,), float("-inf")) if how.sinks is None else how.sinks
    shown = torch.cat((scores.masked_fill(hidden, float("-inf")), sinks.view(-1, 1, 1).expand(-1, count, 1)), dim=2)
    probabilities = shown.softmax(-1)[..., :keys]
    return torch.einsum("hqk,khd->qhd", probabilities, of_values).flatten(1)


CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("dtype", CLOSE)
@settings(max_examples=60)
@given(
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (14, 2), (5, 1), (8, 1)]),
    size=st.sampled_from([32, 64, 96, 128, 256]),
    format=st.sampled_from(["none", "int8", "fp8"]),
    start=st.sampled_from([0, 1, 63, 64, 100, 200, 1000]),
    count=st.integers(1, 20) | st.integers(1, 150),
    block=st.sampled_from([1, 16, 64, 128]),
    window=st.sampled_from([None, 1, 20, 70, 130]),
    cap=st.sampled_from([None, 3.0]),
    alibi=st.booleans(),
    chunk=st.sampled_from([None, 1, 50, 200]),
    sunk=st.booleans(),
    seed=st.integers(0, 9),
)
def test_context_attention(
    dtype: torch.dtype,
    heads: tuple[int, int],
    size: int,
    format: str,
    start: int,
    count: int,
    block: int,
    window: int | None,
    cap: float | None,
    alibi: bool,
    chunk: int | None,
    sunk: bool,
    seed: int,
) -> None:
    """A sequence whose blocks lie anywhere, and whose first `start` tokens were computed before.

    Many keys for few queries and heads are split among the threads.
    """
    for kernels in map(kernels_at, LEVELS):
        torch.manual_seed(seed)
        queries_of, kv_heads = heads
        columns = -(-(start + count) // block)
        table = torch.randperm(columns + 2)[:columns]
        shape = (columns + 2, block, 2 * kv_heads, size)
        storage = torch.zeros(shape, dtype=storage_dtype(format, dtype))  # type: ignore[arg-type]
        cache = LayerCache(storage, None if format == "none" else 0.05, dtype, Scratch())
        slots = torch.arange((columns + 2) * block)
        cache.write(slots, torch.randn(len(slots), 2 * kv_heads, size).to(dtype))
        given_heads = torch.randn(count, queries_of + 2 * kv_heads, size).to(dtype)
        slopes = Alibi(queries_of, 0, queries_of, 1.0, False, torch.device("cpu")).slopes if alibi else None
        sinks = torch.randn(queries_of) * 3 if sunk else None
        how = PagedHeads(queries_of, kv_heads, size, 2 * kv_heads, size**-0.5, cap, window, slopes, chunk, sinks)
        assert attends_context(how)
        out = torch.full((count, queries_of * size), float("nan"), dtype=dtype)
        scale = 1.0 if format == "none" else 0.05
        attend_context(kernels, given_heads, start, table, storage, scale, how, out)
        seen = cache.read(table)[: start + count].float()
        wanted = expected(given_heads[:, :queries_of].float(), seen, start, how)
        bias = 0.0 if slopes is None else float(slopes.max()) * (start + count)
        bound = CLOSE[dtype] + bias * 2**-23  # scores as large as the bias are rounded in float32, the reference's too
        assert float((out.float() - wanted).abs().max() / wanted.abs().max()) < bound


@pytest.mark.parametrize("dtype", CLOSE)
@settings(max_examples=20)
@given(
    heads=st.sampled_from([(4, 2), (5, 1), (8, 1)]),
    size=st.sampled_from([32, 48, 64, 128]),
    format=st.sampled_from(["none", "int8", "fp8"]),
    starts=st.lists(st.sampled_from([0, 30, 510, 511, 700]), min_size=1, max_size=4),
    counts=st.lists(st.integers(1, 9) | st.just(70), min_size=4, max_size=4),
    block=st.sampled_from([16, 64]),
    window=st.sampled_from([None, 20, 520]),
    cap=st.sampled_from([None, 3.0]),
    alibi=st.booleans(),
    chunk=st.sampled_from([None, 50, 600]),
    sunk=st.booleans(),
    seed=st.integers(0, 9),
)
def test_paged_rows_of_one_sequence(
    dtype: torch.dtype,
    heads: tuple[int, int],
    size: int,
    format: str,
    starts: list[int],
    counts: list[int],
    block: int,
    window: int | None,
    cap: float | None,
    alibi: bool,
    chunk: int | None,
    sunk: bool,
    seed: int,
) -> None:
    """Successive tokens of several sequences as rows of paged attention: long ones are computed together."""
    for kernels in map(kernels_at, LEVELS):
        torch.manual_seed(seed)
        queries_of, kv_heads = heads
        ends = [start + count for start, count in zip(starts, counts, strict=False)]
        columns = -(-max(ends) // block)
        tables = torch.randperm(len(starts) * columns).view(len(starts), columns)
        storage = torch.zeros(
            (tables.numel(), block, 2 * kv_heads, size),
            dtype=storage_dtype(format, dtype),  # type: ignore[arg-type]
        )
        scale = 1.0 if format == "none" else 0.05
        cache = LayerCache(storage, None if format == "none" else scale, dtype, Scratch())
        slots = torch.arange(tables.numel() * block)
        cache.write(slots, torch.randn(len(slots), 2 * kv_heads, size).to(dtype))
        sequences = [index for index, count in zip(range(len(starts)), counts, strict=False) for _ in range(count)]
        lengths = torch.cat([torch.arange(a, b) + 1 for a, b in zip(starts, ends, strict=True)])
        queries = torch.randn(len(sequences), queries_of + 2 * kv_heads, size).to(dtype)
        out = torch.full((len(sequences), queries_of * size), float("nan"), dtype=dtype)
        sinks = torch.randn(queries_of) * 3 if sunk else None
        slopes = Alibi(queries_of, 0, queries_of, 1.0, False, torch.device("cpu")).slopes if alibi else None
        how = PagedHeads(queries_of, kv_heads, size, 2 * kv_heads, size**-0.5, cap, window, slopes, chunk, sinks)
        kernels.attend(queries, PagedRows(tables[sequences], lengths, block), storage, scale, how, out)
        given_heads = queries[:, :queries_of].float().split(counts[: len(starts)])
        parts = [
            expected(own, cache.read(table)[:end].float(), start, how)
            for own, table, start, end in zip(given_heads, tables, starts, ends, strict=True)
        ]
        wanted = torch.cat(parts)
        bias = 0.0 if slopes is None else float(slopes.max()) * max(ends)
        bound = CLOSE[dtype] + bias * 2**-23  # see test_context_attention
        assert float((out.float() - wanted).abs().max() / wanted.abs().max()) < bound


def test_what_the_kernel_takes() -> None:
    assert attends_context(PagedHeads(8, 2, 64, 4, 0.125))
    assert not attends_context(PagedHeads(8, 2, 80, 4, 0.125))
    assert not attends_context(PagedHeads(8, 2, 512, 4, 0.125))
    assert not attends_context(PagedHeads(8, 1, 64, 1, 0.125)), "a latent vector"


@pytest.mark.parametrize("dtype", CLOSE)
def test_scores_that_are_no_numbers_are_not_hidden(dtype: torch.dtype) -> None:
    for kernels in map(kernels_at, LEVELS):
        queries, storage = torch.zeros(3, 3, 32).to(dtype), torch.ones(1, 16, 2, 32).to(dtype)
        queries[1, 0, 5] = float("nan")
        out = torch.empty(3, 32).to(dtype)
        table, how = torch.zeros(1, dtype=torch.int64), PagedHeads(1, 1, 32, 2, 1.0)
        attend_context(kernels, queries, 0, table, storage, 1.0, how, out)
        assert out[1].isnan().all()
        assert torch.equal(out[[0, 2]], torch.ones(2, 32).to(dtype))
