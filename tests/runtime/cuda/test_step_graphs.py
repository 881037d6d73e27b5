"""Steps from graphs equal computed ones. On the CPU a graph is the computation itself, with the same memory."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.checkpoints import Layout, tiny_llama, write_checkpoint, write_engine
from tests.runtime.converted import LONG
from tests.runtime.cuda.captures import repeated
from tests.runtime.cuda.kernels import DEVICE, EVERY, paged
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.runtime.cuda.graph_capture import graph_capture_for
from trtforge.runtime.decoder import graph_memory, kv_cache
from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.graph_memory import CommonMemory, PaddedMemory
from trtforge.runtime.decoder.recorded import MOST_RECORDINGS, MOST_ROWS
from trtforge.runtime.decoder.step_graphs import Memory, Outputs, Replay, Shape, StepGraphs
from trtforge.runtime.native.compiler import VARIABLE
from trtforge.runtime.ranks import rank_model
from trtforge.runtime.ranks.single_tokens import MOST_CHUNKED, single_tokens
from trtforge.runtime.ranks.source import open_engine
from trtforge.runtime.scheduling.batch import Step

BLOCK, SEQUENCES, COLUMNS = 8, 6, 4
BLOCKS = 1 + COLUMNS * SEQUENCES
PADDED = PaddedMemory(COLUMNS, BLOCK, 9, DEVICE)
WINDOWED = PaddedMemory(COLUMNS, BLOCK, 9, DEVICE, window_spare=5)


def step_of(starts: list[int], rows: list[int]) -> Step:
    """One token of each of these sequences, at these positions."""
    tables = [[1 + COLUMNS * row + column for column in range(COLUMNS)] for row in rows]
    ones = np.ones(len(rows), dtype=np.int64)
    tokens = [LONG[row + at] for row, at in zip(rows, starts, strict=True)]
    return Step(np.array(starts), ones, ones, np.array(tables), np.array(tokens))


@pytest.fixture(scope="module", params=["none", "fp8", "int8"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadRanks]:
    """A float32 engine that computes as CUDA does, with 16 tokens of each sequence in its cache."""
    directory: Path = tmp_path_factory.mktemp("graphs")
    layout = Layout(kv=None if request.param == "none" else request.param.upper())
    checkpoint = write_checkpoint(tiny_llama(), directory / "checkpoint", layout)
    engine = write_engine(checkpoint, directory / "engine", tokens_per_block=BLOCK, max_seq_len=BLOCK * COLUMNS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "torch")
        patch.setattr(kv_cache, "paged_attention_for", lambda device: paged())
        patch.setattr(rank_model, "graph_capture_for", lambda *_: repeated)
        made = ThreadRanks(open_engine(engine), BLOCKS)
        for row in range(SEQUENCES):
            prompt = step_of([0], [row])
            made.execute(Step(prompt.starts, np.array([16]), np.array([1]), prompt.tables, np.array(LONG[row:][:16])))
        yield made
        made.close()


def graphs_of(ranks: ThreadRanks) -> StepGraphs:
    found = ranks.models[0].graphs
    assert found is not None
    return found


def eager(ranks: ThreadRanks, step: Step) -> Tensor:
    """The logits without graphs."""
    model = ranks.models[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_graphs", None)
        logits = ranks.execute(step)
    assert logits is not None
    return logits


def some_rows() -> st.SearchStrategy[list[tuple[int, int]]]:
    """Sequences with positions up to what is in the cache."""
    return st.lists(
        st.tuples(st.integers(0, SEQUENCES - 1), st.integers(0, 16)),
        min_size=1,
        max_size=SEQUENCES,
        unique_by=lambda x: x[0],
    )


def test_steps_from_graphs_equal_unpadded_ones(ranks: ThreadRanks) -> None:
    """Whatever the graph's memory held before, and wherever the rows are; rows that pad a step change no block."""

    @settings(max_examples=10 if EVERY else 4)
    @given(some_rows())
    def check(rows: list[tuple[int, int]]) -> None:
        step = step_of([at for _, at in rows], [row for row, _ in rows])
        expected = eager(ranks, step)
        cache = [layer.clone() for layer in ranks.models[0].cache]
        written = {int(step.tables[index, at // BLOCK]) for index, (_, at) in enumerate(rows)}
        others = sorted(set(range(BLOCKS)) - written)
        made = ranks.execute(step)
        assert made is not None
        assert made.shape == expected.shape
        assert (made - expected).abs().max() <= 1e-5 * expected.abs().max()
        for layer, before in zip(ranks.models[0].cache, cache, strict=True):
            assert torch.equal(layer[others], before[others])

    check()
    assert set(graphs_of(ranks).captured_rows) <= {1, 2, 4, 8}
    assert len(ranks.models[0].cache[0]) == BLOCKS + 1


def test_three_rows_and_four_share_a_graph(ranks: ThreadRanks) -> None:
    graphs = graphs_of(ranks)
    ranks.execute(step_of([16, 16, 16, 16], [0, 1, 2, 3]))
    before = graphs.captured_rows
    ranks.execute(step_of([16, 16, 16], [3, 4, 5]))
    assert 4 in before
    assert graphs.captured_rows == before


def test_hidden_states_are_those_of_the_steps_rows(ranks: ThreadRanks) -> None:
    step = step_of([16, 12, 3], [1, 2, 3])
    eager(ranks, step)
    expected = ranks.last_hidden().clone()
    ranks.execute(step_of([16, 16, 16, 16], [0, 1, 2, 3]))
    ranks.execute(step)
    assert ranks.last_hidden().shape == expected.shape
    assert torch.allclose(ranks.last_hidden(), expected, atol=1e-4)


def other_steps() -> dict[str, Step]:
    plain = step_of([16, 16], [0, 1])
    two, empty = np.array([2]), np.zeros(0, dtype=np.int64)
    wide = np.zeros((2, COLUMNS + 1), dtype=np.int64)
    many = np.ones(MOST_ROWS + 1, dtype=np.int64)
    return {
        "a context": Step(np.array([0]), two, np.array([1]), plain.tables[:1], plain.tokens),
        "no logits": Step(plain.starts, plain.counts, np.array([0, 1]), plain.tables, plain.tokens),
        "adapters": Step(
            plain.starts, plain.counts, plain.wanted, plain.tables, plain.tokens, 0, empty, np.array([1, 0])
        ),
        "a known length": Step(plain.starts, plain.counts, plain.wanted, plain.tables, plain.tokens, 17),
        "long tables": Step(plain.starts, plain.counts, plain.wanted, wide, plain.tokens),
        "many rows": Step(many, many, many, np.ones((len(many), 1), dtype=np.int64), many),
    }


def never(compute: Callable[[], Outputs], rows: int, wanted: int) -> tuple[Outputs, Replay]:
    raise AssertionError("nothing is captured")


@pytest.mark.parametrize("kind", other_steps())
def test_other_steps_are_computed_without_graphs(kind: str) -> None:
    for memory in (PADDED, CommonMemory(COLUMNS, BLOCK)):
        assert StepGraphs(computed, never, memory).execute(other_steps()[kind]) is None


def beside(rows: list[int], contexts: list[tuple[int, int, int]], wanted: int = 0) -> Step:
    """A token of each of these sequences, and chunks of others: sequences, first positions, numbers of tokens."""
    single = step_of([at % 7 for at in range(len(rows))], rows)
    sequences, firsts, counts = (np.array(each, dtype=np.int64) for each in zip(*contexts, strict=True))
    tokens = [
        LONG[at % len(LONG)] for first, count in zip(firsts, counts, strict=True) for at in range(first, first + count)
    ]
    return Step(
        np.concatenate([single.starts, firsts]),
        np.concatenate([single.counts, counts]),
        np.concatenate([single.wanted, np.full(len(counts), wanted)]),
        np.concatenate([single.tables, 1 + COLUMNS * sequences[:, None] + np.arange(COLUMNS)]),
        np.concatenate([single.tokens, np.array(tokens)]),
    )


@given(
    chunks=st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(2, 9)), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    ),
    rows=st.integers(1, 4),
    wanted=st.integers(0, 1),
)
def test_tokens_of_chunks_are_rows(chunks: list[list[tuple[int, int, int]]], rows: int, wanted: int) -> None:
    """Those without logits behind the others, with positions, slots and tables of their own."""
    graphs = StepGraphs(computed, repeated, CommonMemory(COLUMNS, BLOCK))
    for contexts in chunks:
        step = beside(list(range(rows)), contexts, wanted=wanted)
        found = graphs.execute(single_tokens(step))
        assert found is not None
        assert found.logits is not None
        assert found.last is not None
        logit_rows = step.logit_rows()
        assert found.logits[:, 0].tolist() == step.tokens[logit_rows].tolist()
        assert found.logits[:, 1].tolist() == step.positions()[1][logit_rows].tolist()
        assert len(found.last) == rows + wanted * len(contexts)
        (slots,) = found.states
        positions = [(sequence, first + at) for sequence, first, count in contexts for at in range(count)]
        expected = [(1 + COLUMNS * sequence + at // BLOCK) * BLOCK + at % BLOCK for sequence, at in positions]
        last = [sum(count for _, _, count in contexts[: index + 1]) - 1 for index in range(wanted * len(contexts))]
        order = last + [index for index in range(len(expected)) if index not in last]
        assert slots[rows:, 0].tolist() == [expected[index] for index in order]


@pytest.mark.parametrize(
    ("memory", "step"),
    [
        (PADDED, beside([0], [(1, 0, 2)])),
        (CommonMemory(40, BLOCK), beside([0], [(1, 0, MOST_CHUNKED), (2, 0, 2)])),
    ],
    ids=["on a GPU", "too many"],
)
def test_other_contexts_are_computed_without_graphs(memory: Memory, step: Step) -> None:
    assert StepGraphs(computed, never, memory).execute(single_tokens(step)) is None


def test_a_capture_is_made_once() -> None:
    computations = []

    def counted(batch: Batch) -> Outputs:
        computations.append(len(batch.slots))
        return computed(batch)

    graphs = StepGraphs(counted, repeated, CommonMemory(COLUMNS, BLOCK))
    for _ in range(3):
        graphs.execute(step_of([3, 4], [0, 1]))
    assert computations == [2, 2, 2, 2], "the stand-in computes at a capture, and for each step"


def test_steps_of_about_as_many_rows_share_a_graph() -> None:
    graphs = StepGraphs(computed, repeated, CommonMemory(COLUMNS, BLOCK))
    for size in (5, 8, 6, 7, 3, 4, 1):
        found = graphs.execute(step_of([row % 7 for row in range(size)], [row % SEQUENCES for row in range(size)]))
        assert found is not None
        assert found.logits is not None
        assert len(found.logits) == size
    assert graphs.captured_rows == (1, 4, 8)


def test_the_graphs_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_memory, "power_from", int)
    memory = CommonMemory(COLUMNS, BLOCK)
    graphs = StepGraphs(computed, repeated, memory)
    most = MOST_RECORDINGS
    for size in (*range(1, most + 1), 1, most + 1):
        graphs.execute(step_of([row % 7 for row in range(size)], [row % SEQUENCES for row in range(size)]))
    assert graphs.captured_rows == (1, *range(3, most + 2))


def computed(batch: Batch) -> Outputs:
    """Logits that say which inputs each row had: the last two columns, of layers with windows."""
    assert batch.paged is not None
    slots, seen = batch.slots.view(-1, 1), batch.windowed or batch
    assert seen.paged is not None
    windowed = seen.slots.view(-1, 1), seen.paged.tables[:, :1]
    parts = batch.tokens.view(-1, 1), batch.positions.view(-1, 1), slots, batch.paged.tables, *windowed
    wanted = slice(batch.wanted)
    return Outputs(torch.cat(parts, dim=1)[wanted], batch.paged.lengths.view(-1, 1)[wanted], [slots])


def test_rows_that_pad_a_step_use_the_spare_block() -> None:
    """Table columns of earlier steps stay, beyond the lengths that are read."""
    inputs = PADDED.inputs(Shape(4, 4, True))
    batch = inputs.batch()
    inputs.fill(step_of([16, 17, 18, 19], [0, 1, 2, 3]))
    short = step_of([1], [4])
    inputs.fill(Step(short.starts, short.counts, short.wanted, short.tables[:, :1], short.tokens))
    assert batch.paged is not None
    assert batch.tokens.tolist() == [LONG[5], 0, 0, 0]
    assert batch.positions.tolist() == [1, 0, 0, 0]
    assert batch.slots.tolist() == [17 * BLOCK + 1, 9 * BLOCK, 9 * BLOCK, 9 * BLOCK]
    assert batch.paged.lengths.tolist() == [2, 1, 1, 1]
    assert batch.paged.tables[:, 0].tolist() == [17, 9, 9, 9]
    assert batch.wanted == len(batch.slots) == 4


def test_rows_that_pad_a_step_use_the_spare_window_block() -> None:
    inputs = WINDOWED.inputs(Shape(2, 2, True))
    batch = inputs.batch()
    inputs.fill(windowed(step_of([BLOCK + 1], [4])))
    assert batch.paged is not None
    assert batch.windowed is not None
    assert batch.windowed.paged is not None
    assert batch.slots.tolist() == [18 * BLOCK + 1, 9 * BLOCK]
    assert batch.windowed.slots.tolist() == [118 * BLOCK + 1, 5 * BLOCK]
    assert batch.windowed.paged.tables[:, 0].tolist() == [117, 5]
    assert batch.windowed.paged.lengths.tolist() == batch.paged.lengths.tolist() == [BLOCK + 2, 1]


def windowed(step: Step) -> Step:
    """The step where layers with windows have blocks with other numbers."""
    return replace(step, window_tables=step.tables + 100)


@pytest.mark.parametrize("memory", [WINDOWED, CommonMemory(COLUMNS, BLOCK, windowed=True)])
def test_layers_with_windows_read_their_own_tables(memory: Memory) -> None:
    graphs = StepGraphs(computed, repeated, memory)
    for size in (3, 1, 3):
        step = step_of([row % 7 for row in range(size)], list(range(size)))
        found = graphs.execute(windowed(step))
        assert found is not None
        assert found.logits is not None
        assert found.logits[:, 3:-2].tolist() == step.tables.tolist()
        assert found.logits[:, -1].tolist() == (step.tables[:, 0] + 100).tolist()
        assert (found.logits[:, -2] - found.logits[:, 2]).tolist() == [100 * BLOCK] * size


@pytest.mark.parametrize("memory", [PADDED, CommonMemory(COLUMNS, BLOCK)])
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_outputs_are_those_of_the_rows(memory: Memory, sizes: list[int]) -> None:
    """Whatever graphs were captured before, and however much memory they needed."""
    graphs = StepGraphs(computed, repeated, memory)
    for size in sizes:
        rows = [row % SEQUENCES for row in range(size)]
        step = step_of([row % 7 for row in range(size)], rows)
        found = graphs.execute(step)
        assert found is not None
        assert found.logits is not None
        assert found.last is not None
        assert found.logits[:, 0].tolist() == step.tokens.tolist()
        assert found.logits[:, 3:-2].tolist() == step.tables.tolist()
        assert found.last[:, 0].tolist() == (step.starts + 1).tolist()
        assert [len(each) for each in found.states] == [size]
    assert graphs.captured_rows == tuple(sorted({rows_of(memory, size) for size in sizes}))


def rows_of(memory: Memory, size: int) -> int:
    """Of the graph that computes so many."""
    shape = memory.shape(step_of([0] * size, list(range(size))))
    assert shape is not None
    return shape.rows


def test_what_cannot_be_captured_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    tried = []

    def refused(compute: Callable[[], Outputs], rows: int, wanted: int) -> tuple[Outputs, Replay]:
        tried.append(compute)
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = StepGraphs(computed, refused, PADDED)
    with caplog.at_level(logging.WARNING):
        assert [graphs.execute(step_of([3], [0])) for _ in range(2)] == [None, None]
    assert len(tried) == 1
    assert "some steps are computed without CUDA graphs, slower: operation not permitted" in caplog.text


def test_what_is_captured_in_part_is_computed_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Recordings of kernel calls, between which torch computes: layers are recorded instead."""
    tried = []

    def refused(compute: Callable[[], Outputs], rows: int, wanted: int) -> None:
        tried.append(compute)

    graphs = StepGraphs(computed, refused, CommonMemory(COLUMNS, BLOCK))
    with caplog.at_level(logging.WARNING):
        assert [graphs.execute(step_of([3], [0])) for _ in range(2)] == [None, None]
    assert len(tried) == 1
    assert not graphs.can_capture
    assert not caplog.records


def test_graphs_are_given_back_when_a_capture_fails() -> None:
    captured = iter([True, True])

    def capture(compute: Callable[[], Outputs], rows: int, wanted: int) -> tuple[Outputs, Replay] | None:
        return repeated(compute, rows, wanted) if next(captured, False) else None

    graphs = StepGraphs(computed, capture, CommonMemory(COLUMNS, BLOCK))
    for rows in ([0], [0, 1]):
        assert graphs.execute(step_of(rows, rows)) is not None
    assert (graphs.can_capture, graphs.captured_rows) == (True, (1, 2))
    assert graphs.execute(step_of([0, 1, 2], [0, 1, 2])) is None
    assert (graphs.can_capture, graphs.captured_rows) == (False, ())
    assert graphs.execute(step_of([0], [0])) is None


def test_cpus_capture_no_graphs() -> None:
    assert graph_capture_for(torch.device("cpu"), 0) is None
