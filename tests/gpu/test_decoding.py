"""Single tokens on the GPU: the paged kernel against gathered blocks, and graphs against operations one by one."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.engines import BLOCK, LENGTHS, TOKENS, checkpoint_of, decoded, error, gpu_engine, ranks_of, reference_of
from tests.gpu.test_formats import DTYPES
from tests.runtime.cuda import test_paged_chunks
from tests.runtime.cuda.test_paged_attention import TOLERANCES, Case, difference
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.core.dtypes import ModelDtype
from trtforge.core.recipe import KvCacheFormat
from trtforge.engine_process.requests import GenerationRequest, SamplingParams
from trtforge.runtime import deferred
from trtforge.runtime.architecture.positions import ALL, Reach
from trtforge.runtime.decoder import kv_cache
from trtforge.runtime.decoder.block_copies import BlockCopies
from trtforge.runtime.decoder.padding import padded_rows
from trtforge.runtime.deferred import may_be_deferred
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.native.compiler import VARIABLE
from trtforge.runtime.ranks import rank_model
from trtforge.runtime.ranks.source import DEFAULT_TOKENS_PER_BLOCK
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.rows import Row

pytestmark = pytest.mark.gpu

QUANTISED = [
    (None, 0.02),
    ("W8A16", 0.02),
    ("W4A16_AWQ", 0.02),
    ("FP8", 0.02),
    ("FP8_PER_CHANNEL_PER_TOKEN", 0.1),
    ("NVFP4", 0.1),
]
"""Formats, and how far logits may be apart where the same kernels compute them."""


def every_pair(*others: object) -> list[tuple[object, ...]]:
    """Every pair of a size of heads, a type, one of three `others`, a kind of cache and a reach.

    Kernels for all of them together would take a quarter of an hour to compile.
    """
    kinds, reaches = ("none", "fp8", "int8"), (ALL, Reach(window=1000), Reach(chunk=2048))
    every = enumerate(product((64, 96, 128, 256), TOLERANCES, others))
    return [(*each, kinds[(at + at // 3) % 3], reaches[(at // 3 + 2 * at + at // 9) % 3]) for at, each in every]


@pytest.mark.parametrize(
    ("size", "dtype", "lengths", "kv", "reach"), every_pair((9000,), (300,), tuple(range(1, 4000, 61)))
)
def test_the_paged_kernel_equals_gathered_blocks(
    dtype: torch.dtype, kv: KvCacheFormat, reach: Reach, lengths: tuple[int, ...], size: int
) -> None:
    """One long context, split, and many rows."""
    case = Case(lengths, kv_heads=8, group=4, size=size, block=32, reach=reach, kv=kv, dtype=dtype, processors=132)
    assert difference(case) < TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("size", "dtype", "chunks", "kv", "reach"),
    every_pair(((5000, 20),), ((3000, 1500), (0, 700), (40, 90), (900, 1)), ((4000, 7), (0, 3))),
)
def test_the_kernel_of_chunks_equals_gathered_blocks(
    dtype: torch.dtype, kv: KvCacheFormat, reach: Reach, chunks: tuple[tuple[int, int], ...], size: int
) -> None:
    """A few tokens after many, whose context is split, and all kinds together."""
    case = test_paged_chunks.Case(
        chunks, kv_heads=8, group=4, size=size, block=32, reach=reach, kv=kv, dtype=dtype, processors=132
    )
    assert test_paged_chunks.difference(case) < TOLERANCES[dtype]


@pytest.mark.parametrize("kv", [None, "FP8", "INT8"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02), ("float16", 0.005)])
def test_engines_with_and_without_attention_in_place_agree(
    kv: str | None, dtype: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = gpu_engine(checkpoint_of(tmp_path, kv=kv), tmp_path / "engine", dtype)
    own = ranks_of(source)
    monkeypatch.setattr(kv_cache, "paged_attention_for", lambda device: None)
    gathered = ranks_of(source)
    assert own.models[0].graphs is not None
    assert gathered.models[0].graphs is None
    assert error(decoded(own), decoded(gathered)) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", [None, "FP8", "INT8"])
def test_engines_with_kernels_are_as_near_to_float32_as_without(
    kv: str | None, dtype: ModelDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sums differ in their last bits, cached numbers may be rounded differently."""
    checkpoint = checkpoint_of(tmp_path, kv=kv)
    source = gpu_engine(checkpoint, tmp_path / "engine", dtype)
    exact = decoded(ranks_of(reference_of(checkpoint)), DEFAULT_TOKENS_PER_BLOCK)
    own = ranks_of(source)
    monkeypatch.setenv(VARIABLE, "torch")
    assert error(decoded(own), exact) < 1.5 * error(decoded(ranks_of(source)), exact) + 0.01


def test_contents_go_to_pinned_memory_and_come_back() -> None:
    """Swapped between device and host many times, as the kernels' stream orders it."""
    layers = [torch.randn(6, 32, 16, 64, device="cuda").to(dtype) for dtype in (torch.bfloat16, torch.float32)]
    before = [layer.clone() for layer in layers]
    copies = BlockCopies(layers, 4, 3)
    copies.copy(np.array([(block, 4 + block) for block in range(3)]).reshape(-1))
    for layer in layers:
        layer[:3] = 0
    swap = np.array([pair for block in range(3) for pair in ((block, 4 + block), (4 + block, block))]).reshape(-1)
    for _ in range(101):
        copies.copy(swap)
    for layer, expected in zip(layers, before, strict=True):
        assert torch.equal(layer, expected)


@pytest.mark.parametrize(("quant", "tolerance"), QUANTISED)
def test_graphs_compute_what_single_operations_do(
    quant: str | None, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: the second time every step is replayed."""
    source = gpu_engine(checkpoint_of(tmp_path, quant=quant), tmp_path / "engine", "bfloat16")
    replayed = ranks_of(source)
    monkeypatch.setattr(rank_model, "graph_capture_for", lambda *_: None)
    eager = ranks_of(source)
    expected = decoded(eager)
    assert eager.models[0].graphs is None
    for _ in range(2):
        assert error(decoded(replayed), expected) < tolerance
    graphs = replayed.models[0].graphs
    assert graphs is not None
    assert graphs.captured_rows == (padded_rows(len(LENGTHS)),)


@pytest.mark.parametrize("quant", [quant for quant, _ in QUANTISED])
@pytest.mark.parametrize("kv", [None, "FP8"])
@pytest.mark.parametrize(("lengths", "captured"), [((30, 64, 9, 50, 30), 64), ((450, 512, 510), 512)])
def test_prompts_from_graphs_are_those_of_single_operations(
    quant: str | None,
    kv: str | None,
    lengths: tuple[int, ...],
    captured: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As near to float32, where other kernels may compute so many tokens: of 512, cuDNN's. All but the first ones are
    replayed."""
    checkpoint = checkpoint_of(tmp_path, quant=quant, kv=kv)
    source = gpu_engine(checkpoint, tmp_path / "engine", "bfloat16", max_seq_len=600, max_num_tokens=600)
    replayed, exact = ThreadRanks(source, 40), ThreadRanks(reference_of(checkpoint), 40)
    monkeypatch.setattr(rank_model, "graph_capture_for", lambda *_: None)
    eager = ThreadRanks(source, 40)
    for row, length in enumerate(lengths):
        tokens, found = np.array((TOKENS[row % len(TOKENS)] * 8)[:length]), []
        for ranks, block in ((replayed, BLOCK), (eager, BLOCK), (exact, DEFAULT_TOKENS_PER_BLOCK)):
            table = 1 + np.arange(-(-length // block)).reshape(1, -1)
            made = ranks.execute(Step(np.array([0]), np.array([length]), np.array([1]), table, tokens))
            assert made is not None
            found.append(made.cpu())
        assert error(found[0], found[2]) < 1.5 * error(found[1], found[2]) + 0.01
    graphs = replayed.models[0].prompt_graphs
    assert graphs is not None
    assert graphs.captured_rows == (captured,)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_several_prompts_at_once_are_computed_as_one_by_one(dtype: str, tmp_path: Path) -> None:
    source = gpu_engine(checkpoint_of(tmp_path), tmp_path / "engine", dtype)
    together, alone = ranks_of(source), ranks_of(source)
    columns = -(-max(LENGTHS) // BLOCK)
    tables = 1 + np.arange(len(LENGTHS) * columns).reshape(len(LENGTHS), columns)
    tokens = [np.array(TOKENS[row][:length]) for row, length in enumerate(LENGTHS)]
    ones, none = np.ones(len(LENGTHS), dtype=np.int64), np.zeros(len(LENGTHS), dtype=np.int64)
    found = together.execute(Step(none, np.array(LENGTHS), ones, tables, np.concatenate(tokens)))
    assert found is not None
    for row, length in enumerate(LENGTHS):
        one = np.array([length])
        expected = alone.execute(Step(none[:1], one, ones[:1], tables[row : row + 1], tokens[row]))
        assert expected is not None
        assert error(found[row].cpu(), expected[0].cpu()) < 0.02


def test_steps_that_begin_before_the_last_tokens_are_known_change_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of many lengths, some of which end early, pause, or sample with what the host must know."""
    source = gpu_engine(checkpoint_of(tmp_path), tmp_path / "engine", "float32")
    ends = [frozenset(), frozenset(range(3, 40))]
    drawn = SamplingParams(top_k=5, temperature=3.0, seed=3)
    requests = [
        GenerationRequest(
            str(at),
            tuple(TOKENS[at % 5][at:][: 3 + at]),
            5 + 3 * at,
            drawn if at % 7 == 6 else SamplingParams(),
            end_ids=ends[at % 3 == 0],
        )
        for at in range(20)
    ]

    begun_ahead: list[bool] = []

    def counted(rows: list[Row]) -> bool:
        begun_ahead.append(may_be_deferred(rows))
        return begun_ahead[-1]

    options = EngineOptions(scheduler="max_utilization", kv_cache_tokens=128, chunked_context=True)
    found = []
    for decide in (counted, lambda rows: False):
        monkeypatch.setattr(deferred, "may_be_deferred", decide)
        with Engine.load(source.directory, options) as engine:
            made = generate_with(engine, requests)
            found.append([(each.tokens, each.finish_reason) for each in made])
            figures = engine.statistics()
            assert (figures.kv_blocks_used, figures.paused_requests > 0) == (0, True)
    assert sum(begun_ahead) > 20
    assert found[0] == found[1]
    assert {reason for _, reason in found[0]} == {"length", "end_id"}
