"""Attention of chunks by the Triton kernel equals attention of gathered blocks."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.cuda.kernels import DEVICE, EVERY, paged, scores_of
from trtforge.core.recipe import KvCacheFormat
from trtforge.runtime.architecture.positions import ALL, Reach
from trtforge.runtime.cuda.paged_attention import tile_for
from trtforge.runtime.cuda.paged_chunks import PagedChunks
from trtforge.runtime.decoder import kv_cache
from trtforge.runtime.decoder.attention import Attention
from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.kv_cache import LayerCache, Scratch, storage_dtype
from trtforge.runtime.decoder.scores import Scores
from trtforge.runtime.native.compiler import VARIABLE
from trtforge.runtime.scheduling.batch import Step

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Eight times the type's precision: probabilities, values from the cache and outputs are rounded on both sides."""


@dataclass(frozen=True)
class Case:
    """A step of chunks of these (start, tokens), single tokens first, over a cache of random values."""

    chunks: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    group: int = 2
    size: int = 16
    block: int = 4
    reach: Reach = ALL
    kv: KvCacheFormat = "none"
    dtype: torch.dtype = torch.float32
    cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    processors: int = 1

    @property
    def scores(self) -> Scores:
        return scores_of(self.kv_heads, self.group, self.size, self.cap, alibi=self.alibi, sinks=self.sinks)

    @property
    def step(self) -> Step:
        """Blocks lie in random order."""
        starts, counts = np.array(sorted(self.chunks, key=lambda chunk: chunk[1] > 1)).T
        held = -(-(starts + counts) // self.block)
        order, tables = torch.randperm(int(held.sum()) + 1).tolist(), np.zeros((len(held), held.max()), dtype=np.int64)
        for row, count in enumerate(held):
            tables[row, :count] = [order.pop() for _ in range(count)]
        return Step(starts, counts, np.ones_like(counts), tables, np.zeros(counts.sum(), dtype=np.int64))


def difference(case: Case) -> float:
    """The largest between kernels and gathered blocks, relative to the largest output."""
    torch.manual_seed(sum(map(sum, case.chunks)))
    heads, vectors, step = case.kv_heads * case.group, 2 * case.kv_heads, case.step
    attention = Attention(heads, case.kv_heads, case.size, case.scores, case.reach)
    shape = (int(step.tables.max()) + 1, case.block, vectors, case.size)
    factor = None if case.kv == "none" else 0.02
    filled = torch.randn(shape[0] * shape[1], vectors, case.size, device=DEVICE).to(case.dtype)
    given_heads = torch.randn(len(step.tokens), heads + vectors, case.size, device=DEVICE).to(case.dtype)
    found = []
    for in_place in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, "torch")
            if in_place:
                patch.setattr(kv_cache, "paged_attention_for", lambda device: paged(case.processors))
            storage = torch.zeros(shape, dtype=storage_dtype(case.kv, case.dtype), device=DEVICE)
            cache = LayerCache(storage, factor, case.dtype, Scratch())
        cache.write(torch.arange(len(filled), device=DEVICE), filled)
        batch = Batch.of(step, case.block, DEVICE, case.dtype, reaches=(case.reach,), in_place=in_place)
        assert (batch.chunks is not None and attention._in_place(batch.chunks, cache)) is in_place
        found.append(attention(given_heads, batch, cache).float())
        if in_place:
            assert not cache._in_place._arrived.any()  # type: ignore[union-attr]
    expected, made = found
    return float((made - expected).abs().max() / expected.abs().max())


STARTED = st.tuples(st.integers(1, 100), st.integers(1, 100))
FRESH = st.tuples(st.just(0), st.integers(2, 100))


@settings(max_examples=30 if EVERY else 10)
@given(
    st.builds(
        Case,
        chunks=st.tuples(
            st.tuples(st.integers(1, 100), st.integers(2, 100)), st.lists(STARTED | FRESH, max_size=2)
        ).map(lambda found: (found[0], *found[1])),
        group=st.sampled_from([1, 2, 3, 7]),
        size=st.sampled_from([8, 16, 24, 64, 80]),
        block=st.sampled_from([1, 4, 16, 24, 32]),
        reach=st.sampled_from([Reach(), Reach(window=1), Reach(window=33), Reach(window=64), Reach(chunk=24)]),
        kv=st.sampled_from(["none", "fp8", "int8"]),
        dtype=st.sampled_from(list(TOLERANCES)),
    )
)
def test_chunks_equal_gathered_blocks(case: Case) -> None:
    assert difference(case) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("kv", ["none", "fp8"])
@pytest.mark.parametrize("reach", [Reach(), Reach(window=300), Reach(chunk=512)])
@pytest.mark.parametrize("sinks", [False, True])
def test_parts_of_long_contexts_are_combined(kv: KvCacheFormat, reach: Reach, sinks: bool) -> None:
    """A few tokens after many, and fewer after none."""
    assert difference(Case(((1100, 20), (0, 3)), block=32, kv=kv, reach=reach, sinks=sinks, processors=32)) < 1e-5


@pytest.mark.parametrize("processors", [1, 32])
@pytest.mark.parametrize("change", [{"cap": 5.0}, {"alibi": True}, {"sinks": True}, {"cap": 2.0, "sinks": True}])
def test_scores_are_changed_before_the_softmax(change: dict[str, object], processors: int) -> None:
    chunks = ((700, 9), (0, 13), (3, 1))
    case = Case(chunks, group=3, block=16, reach=Reach(window=600), processors=processors, **change)  # type: ignore[arg-type]
    assert difference(case) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_heads(dtype: torch.dtype) -> None:
    assert difference(Case(((70, 75), (0, 20)), size=256, block=16, dtype=dtype)) < TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("size", "number", "queries", "tokens"),
    [
        (128, 2, [16, 16, 64, 128, 128], 64),
        (256, 2, [16, 16, 64, 64, 64], 32),
        (64, 4, [16, 16, 64, 64, 64], 32),
        (128, 4, [16, 16, 64, 64, 64], 32),
        (256, 4, [16, 16, 16, 16, 16], 32),
    ],
)
def test_tiles_of_large_heads_are_small(size: int, number: int, queries: list[int], tokens: int) -> None:
    found = [tile_for(count, size, number) for count in (2, 16, 17, 65, 5000)]
    assert [each.queries for each in found] == queries
    assert {each.tokens for each in found} == {tokens}


def test_tiles_that_see_most_come_first() -> None:
    firsts, starts, counts = np.array([1, 6]), np.array([0, 100]), np.array([5, 9])
    chunks = PagedChunks((firsts, starts, counts), np.zeros((2, 4), dtype=np.int64), 32, DEVICE)
    assert chunks.tiles(4).tolist() == [[1, 8], [1, 4], [1, 0], [0, 4], [0, 0]]
    assert chunks.rows.tolist() == [[1, 0, 5], [6, 100, 9]]
    assert (chunks.most_tokens, chunks.longest, chunks.whole) == (9, 109, False)
