"""Attention by the Triton kernels equals attention of gathered blocks."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.cuda.kernels import DEVICE, paged
from trtforge.core.recipe import KvCacheFormat
from trtforge.models.transforms import quantize_fp8
from trtforge.runtime.architecture.positions import ALL, Reach
from trtforge.runtime.cuda.paged_attention import paged_attention_for, splits_for
from trtforge.runtime.decoder.alibi import Alibi
from trtforge.runtime.decoder.attention import Attention, Batch
from trtforge.runtime.decoder.kv_cache import LayerCache, Scratch, storage_dtype
from trtforge.runtime.decoder.scores import FusedScores, Scores, SoftmaxScores
from trtforge.runtime.native.bindings import PagedHeads, PagedRows
from trtforge.runtime.scheduling.batch import Step

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@dataclass(frozen=True)
class Case:
    """Attention of single-token rows over a cache of random values."""

    lengths: tuple[int, ...]
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
    latent: bool = False
    processors: int = 16
    codes: bool = False
    """Whether E4M3 of the output is compared too, with what is rounded afterwards."""

    @property
    def scores(self) -> Scores:
        scale, heads = self.size**-0.5, self.kv_heads * self.group
        alibi = Alibi(heads, 0, heads, 1.0, False, DEVICE) if self.alibi else None
        sinks = torch.randn(self.kv_heads, self.group, 1, 1, device=DEVICE) * 3 if self.sinks else None
        plain = self.cap is None and alibi is None and sinks is None
        return FusedScores(scale) if plain else SoftmaxScores(scale, self.cap, alibi, sinks)


def difference(case: Case) -> float:
    """The largest between kernels and gathered blocks, relative to the largest output."""
    torch.manual_seed(len(case.lengths) + sum(case.lengths))
    heads, vectors = case.kv_heads * case.group, 1 if case.latent else 2 * case.kv_heads
    scores, rows = case.scores, len(case.lengths)
    held = [-(-length // case.block) for length in case.lengths]
    order, tables = torch.randperm(sum(held) + 1).tolist(), np.zeros((rows, max(held)), dtype=np.int64)
    for row, count in enumerate(held):
        tables[row, :count] = [order.pop() for _ in range(count)]
    ones, starts = np.ones(rows, dtype=np.int64), np.array(case.lengths, dtype=np.int64) - 1
    step = Step(starts, ones, ones, tables, np.zeros(rows, dtype=np.int64))
    shape = (sum(held) + 1, case.block, vectors, case.size)
    storage = torch.zeros(shape, dtype=storage_dtype(case.kv, case.dtype), device=DEVICE)
    cache = LayerCache(storage, None if case.kv == "none" else 0.02, case.dtype, Scratch())
    slots = torch.arange(shape[0] * shape[1], device=DEVICE)
    cache.write(slots, torch.randn(len(slots), *shape[2:], device=DEVICE).to(case.dtype))
    given_heads = torch.randn(rows, heads + vectors, case.size, device=DEVICE).to(case.dtype)
    gathered = Batch.of(step, case.block, DEVICE, case.dtype, reaches=(case.reach,))
    attention = Attention(heads, case.kv_heads, case.size, scores, case.reach, case.latent)
    expected = attention(given_heads, gathered, cache).float()
    in_place = Batch.of(step, case.block, DEVICE, case.dtype, in_place=True)
    assert in_place.paged is not None
    how = PagedHeads(
        heads,
        case.kv_heads,
        case.size,
        vectors,
        scores.scale,
        case.cap,
        case.reach.window,
        None if scores.alibi is None else scores.alibi.slopes,
        case.reach.chunk,
        None if scores.sinks is None else scores.sinks.flatten(),
    )
    made = torch.full((rows, heads * case.size), torch.nan, dtype=case.dtype, device=DEVICE)
    scale = 1.0 if case.kv == "none" else 0.02
    kernels = paged(case.processors)
    kernels.attend(given_heads, in_place.paged, storage, scale, how, made)
    again = torch.empty_like(made)
    kernels.attend(given_heads, in_place.paged, storage, scale, how, again)
    assert torch.equal(made, again)  # what counts splits is left as it was found
    if case.codes:
        codes, code_scale = torch.empty_like(made, dtype=torch.float8_e4m3fn), torch.tensor([0.004], device=DEVICE)
        kernels.attend(given_heads, in_place.paged, storage, scale, how, codes, code_scale)
        assert torch.equal(codes.view(torch.uint8), quantize_fp8(made, code_scale).view(torch.uint8))
    return float((made.float() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("lengths", [(5, 40), (700,)])
def test_outputs_in_e4m3_are_those_that_are_rounded_afterwards(dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    """One split and several."""
    assert difference(Case(lengths, dtype=dtype, kv="fp8", sinks=True, codes=True)) < TOLERANCES[dtype]


@settings(max_examples=40)
@given(
    st.builds(
        Case,
        lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4).map(tuple),
        kv_heads=st.integers(1, 3),
        group=st.sampled_from([1, 2, 3, 4, 7]),
        size=st.sampled_from([8, 16, 24, 64, 80]),
        block=st.sampled_from([1, 4, 16, 24, 32]),
        reach=st.sampled_from([Reach(), Reach(window=1), Reach(window=33), Reach(window=64), Reach(chunk=24)]),
        kv=st.sampled_from(["none", "fp8", "int8"]),
        dtype=st.sampled_from(list(TOLERANCES)),
    )
)
def test_rows_equal_gathered_blocks(case: Case) -> None:
    assert difference(case) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("kv", ["none", "fp8", "int8"])
@pytest.mark.parametrize("reach", [Reach(), Reach(window=300), Reach(chunk=512)])
@pytest.mark.parametrize("sinks", [False, True])
def test_split_contexts_equal_gathered_blocks(kv: KvCacheFormat, reach: Reach, sinks: bool) -> None:
    """Of the short row, most splits are empty; those of the window and the chunk begin within the context."""
    case = Case((3, 1100), block=32, kv=kv, reach=reach, sinks=sinks)
    assert splits_for(4, 35 * 32, case.processors) == 4
    assert difference(case) < 1e-5


@pytest.mark.parametrize("processors", [1, 16])
@pytest.mark.parametrize("change", [{"cap": 5.0}, {"alibi": True}, {"sinks": True}, {"cap": 2.0, "sinks": True}])
def test_scores_are_changed_before_the_softmax(change: dict[str, object], processors: int) -> None:
    case = Case((700, 5), group=3, block=16, reach=Reach(window=600), processors=processors, **change)  # type: ignore[arg-type]
    assert difference(case) < 1e-5


@pytest.mark.parametrize("processors", [1, 16])
def test_one_latent_vector_is_key_and_value(processors: int) -> None:
    assert difference(Case((600, 9), kv_heads=1, group=16, size=40, latent=True, processors=processors)) < 1e-5


def test_tables_may_lie_by_columns() -> None:
    """A graph's do: the columns that a step uses are then copied at once."""
    torch.manual_seed(0)
    storage, queries = torch.randn(9, 4, 2, 16, device=DEVICE), torch.randn(2, 4, 16, device=DEVICE)
    tables, lengths = torch.tensor([[3, 1, 8], [2, 5, 0]], device=DEVICE), torch.tensor([10, 6], device=DEVICE)
    how = PagedHeads(heads=2, kv_heads=1, size=16, vectors=2, scale=0.25)
    made = torch.zeros(2, 2, 32, device=DEVICE)
    for out, lying in zip(made, (tables, tables.t().contiguous().t()), strict=True):
        paged().attend(queries, PagedRows(lying, lengths, 4), storage, 1.0, how, out)
    assert made.abs().sum() > 0
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("programs", "longest", "splits"),
    [(8, 131072, 32), (8, 1024, 4), (8, 255, 1), (64, 131072, 4), (264, 131072, 1), (1024, 131072, 1), (8, 800, 2)],
)
def test_splits_fill_a_gpu_of_132_multiprocessors(programs: int, longest: int, splits: int) -> None:
    assert splits_for(programs, longest, 132) == splits


def test_other_devices_have_no_triton_kernels() -> None:
    assert paged_attention_for(torch.device("cpu")) is None


def test_large_heads_are_gathered() -> None:
    assert paged().attends(256)
    assert not paged().attends(576)
