"""Attention by the Triton kernels equals attention of gathered blocks."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.cuda.kernels import DEVICE, EVERY, fused, paged, scores_of
from trtforge.core.recipe import KvCacheFormat
from trtforge.models.transforms import quantize_fp8
from trtforge.runtime.architecture.positions import ALL, Reach
from trtforge.runtime.cuda.paged_attention import Turning, paged_attention_for, splits_for, tile_of_rows
from trtforge.runtime.decoder.attention import Attention
from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.kv_cache import LayerCache, Scratch, storage_dtype
from trtforge.runtime.decoder.scores import Scores
from trtforge.runtime.native.bindings import PagedHeads, PagedRows
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.draft_trees import SEES_ALL, seen_slots

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Eight times the type's precision: probabilities, values from the cache and outputs are rounded on both sides."""


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
    parents: tuple[int, ...] = ()
    """Of a tree of drafts after the last row, if there are any: see `draft_trees`."""
    codes: bool = False
    """Whether E4M3 of the output is compared too, with what is rounded afterwards."""

    @property
    def scores(self) -> Scores:
        return scores_of(self.kv_heads, self.group, self.size, self.cap, alibi=self.alibi, sinks=self.sinks)


def step_of(lengths: tuple[int, ...], block: int) -> Step:
    """A step of single-token rows whose blocks lie in random order."""
    held = [-(-length // block) for length in lengths]
    order, tables = torch.randperm(sum(held) + 1).tolist(), np.zeros((len(lengths), max(held)), dtype=np.int64)
    for row, count in enumerate(held):
        tables[row, :count] = [order.pop() for _ in range(count)]
    ones, starts = np.ones(len(lengths), dtype=np.int64), np.array(lengths, dtype=np.int64) - 1
    return Step(starts, ones, ones, tables, np.zeros(len(lengths), dtype=np.int64))


def with_tree(step: Step, parents: tuple[int, ...], block: int) -> Step:
    """The step with rows for a tree of drafts after its last row, whose sequence gets new blocks for them."""
    nodes, root = len(parents), int(step.starts[-1])
    held, needed = root // block + 1, (root + nodes) // block + 1
    table = np.append(step.tables[-1, :held], step.tables.max() + 1 + np.arange(needed - held))
    tables = np.zeros((len(step.starts) + nodes, max(needed, step.tables.shape[1])), dtype=np.int64)
    tables[: len(step.starts), : step.tables.shape[1]] = step.tables
    tables[len(step.starts) - 1 :, :needed] = table
    ones, starts = np.ones(len(tables), dtype=np.int64), np.append(step.starts, root + 1 + np.arange(nodes))
    seen = np.array([SEES_ALL] * len(step.starts) + seen_slots(parents), dtype=np.int64)
    return Step(starts, ones, ones, tables, np.zeros(len(tables), dtype=np.int64), seen=seen)


def difference(case: Case) -> float:
    """The largest between kernels and gathered blocks, relative to the largest output."""
    torch.manual_seed(len(case.lengths) + sum(case.lengths))
    heads, vectors = case.kv_heads * case.group, 1 if case.latent else 2 * case.kv_heads
    scores, step = case.scores, step_of(case.lengths, case.block)
    step = with_tree(step, case.parents, case.block) if case.parents else step
    rows = len(step.starts)
    shape = (int(step.tables.max()) + 1, case.block, vectors, case.size)
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


@settings(max_examples=40 if EVERY else 20)
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


@settings(max_examples=10 if EVERY else 4)
@given(
    st.builds(
        Case,
        lengths=st.lists(st.integers(1, 150) | st.integers(500, 600), min_size=1, max_size=3).map(tuple),
        kv_heads=st.integers(1, 3),
        group=st.sampled_from([1, 3, 4]),
        size=st.sampled_from([8, 24, 64]),
        block=st.sampled_from([1, 16, 24]),
        reach=st.sampled_from([Reach(), Reach(window=1), Reach(window=33), Reach(chunk=24)]),
        kv=st.sampled_from(["none", "fp8", "int8"]),
        dtype=st.sampled_from(list(TOLERANCES)),
    ),
    st.sampled_from([4, 8]),
    st.booleans(),
)
def test_what_one_kernel_rotates_and_writes_first(case: Case, dim: int, interleaved: bool) -> None:
    """Exactly as by a kernel before: the results, and what the cache holds afterwards."""
    torch.manual_seed(sum(case.lengths))
    heads, rows = case.kv_heads * case.group, len(case.lengths)
    paged_rows = Batch.of(step_of(case.lengths, case.block), case.block, DEVICE, case.dtype, in_place=True)
    assert paged_rows.paged is not None
    assert paged_rows.paged.apart
    shape = int(paged_rows.paged.tables.max()) + 1, case.block, 2 * case.kv_heads, case.size
    before = torch.zeros(shape, dtype=storage_dtype(case.kv, case.dtype), device=DEVICE)
    factor = 1.0 if case.kv == "none" else 0.02
    slots = torch.arange(shape[0] * shape[1], device=DEVICE)
    cached = torch.randn(len(slots), *shape[2:], device=DEVICE).to(case.dtype)
    fused().quantize_slots(before.flatten(0, 1), slots, cached, factor)
    given_heads = torch.randn(rows, heads + 2 * case.kv_heads, case.size, device=DEVICE).to(case.dtype)
    cos, sin = torch.randn(2, rows, 1, dim, device=DEVICE).to(case.dtype)
    how = PagedHeads(
        heads, case.kv_heads, case.size, shape[2], case.size**-0.5, window=case.reach.window, chunk=case.reach.chunk
    )
    found = []
    for turning in (None, Turning(cos, sin, interleaved)):
        storage, own = before.clone(), given_heads.clone()
        out = torch.empty(rows, heads * case.size, dtype=case.dtype, device=DEVICE)
        if turning is None:
            fused().rotate_and_write(
                own,
                cos,
                sin,
                storage.flatten(0, 1),
                paged_rows.slots,
                factor,
                queries=heads,
                keys=case.kv_heads,
                interleaved=interleaved,
            )
        kernels = paged(case.processors)
        kernels.attend(own[:, :heads], paged_rows.paged, storage, factor, how, out, None, turning)
        assert not kernels._arrived.any()
        found.append((out, storage.view(torch.uint8)))
    (by_two, written_by_two), (by_one, written_by_one) = found
    assert torch.equal(written_by_one, written_by_two)
    assert not torch.equal(written_by_one, before.view(torch.uint8))
    assert torch.equal(by_one, by_two)


@pytest.mark.parametrize("processors", [1, 16])
@pytest.mark.parametrize("change", [{"cap": 5.0}, {"alibi": True}, {"sinks": True}, {"cap": 2.0, "sinks": True}])
def test_scores_are_changed_before_the_softmax(change: dict[str, object], processors: int) -> None:
    case = Case((700, 5), group=3, block=16, reach=Reach(window=600), processors=processors, **change)  # type: ignore[arg-type]
    assert difference(case) < 1e-5


@pytest.mark.parametrize("processors", [1, 16])
def test_one_latent_vector_is_key_and_value(processors: int) -> None:
    assert difference(Case((600, 9), kv_heads=1, group=16, size=40, latent=True, processors=processors)) < 1e-5


@settings(max_examples=30 if EVERY else 12, deadline=None)
@given(
    root=st.sampled_from([1, 15, 63, 64, 200, 700]),
    nodes=st.lists(st.integers(0, 62), min_size=1, max_size=63),
    block=st.sampled_from([4, 16, 32]),
    size=st.sampled_from([16, 64]),
    processors=st.sampled_from([1, 16]),
    kv=st.sampled_from(["none", "fp8", "int8"]),
)
def test_rows_of_a_tree_see_their_ancestors(
    root: int, nodes: list[int], block: int, size: int, processors: int, kv: KvCacheFormat
) -> None:
    """One split and several, some of which see nothing."""
    parents = tuple(node % (index + 1) - 1 for index, node in enumerate(nodes))
    case = Case((9, root), size=size, block=block, kv=kv, processors=processors, parents=parents)
    assert difference(case) < TOLERANCES[torch.float32]


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


@pytest.mark.parametrize(
    ("group", "size", "number", "expected"),
    [
        (4, 128, 2, (16, 64, 4)),
        (71, 64, 2, (128, 64, 4)),
        (8, 256, 2, (16, 32, 4)),
        (4, 64, 4, (16, 64, 4)),
        (40, 64, 4, (64, 32, 4)),
        (71, 64, 4, (128, 32, 8)),
        (48, 128, 4, (64, 32, 8)),
    ],
)
def test_programs_of_many_heads_take_few_tokens(
    group: int, size: int, number: int, expected: tuple[int, int, int]
) -> None:
    tile = tile_of_rows(group, size, number)
    assert (tile.queries, tile.tokens, tile.warps) == expected


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_many_heads_with_one_of_keys(dtype: torch.dtype) -> None:
    assert difference(Case((300, 9), kv_heads=1, group=71, size=64, block=16, dtype=dtype)) < TOLERANCES[dtype]


def test_other_devices_have_no_triton_kernels() -> None:
    assert paged_attention_for(torch.device("cpu")) is None


def test_large_heads_are_gathered() -> None:
    assert paged().attends(256)
    assert not paged().attends(576)
