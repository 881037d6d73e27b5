"""The parts of a step, in their order, and a step of single tokens compute what the whole step computes."""

from dataclasses import replace

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from trtforge.runtime.ranks.micro_batches import micro_batches
from trtforge.runtime.ranks.single_tokens import MOST_CHUNKED, single_tokens
from trtforge.runtime.scheduling.batch import Step

Computed = list[tuple[int, int, int, bool]]
ZERO = np.zeros(1, dtype=np.int64)
TWO_TOKENS = Step(
    ZERO,
    ZERO + 2,
    ZERO,
    np.arange(3).reshape(1, 3),
    np.arange(2),
    7,
    np.array([1, 2]),
    window_copies=np.array([3, 4]),
    candidates=20,
)
"""A prompt that is too short to be cut."""


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Single-token rows, then others, some of which give logits."""
    singles = draw(st.integers(0, 40))
    longer = draw(st.lists(st.integers(2, 200), min_size=0 if singles else 1, max_size=5))
    counts = np.array([1] * singles + longer, dtype=np.int64)
    rows = len(counts)
    starts = np.array(draw(st.lists(st.integers(0, 50), min_size=rows, max_size=rows)), dtype=np.int64)
    wanted = np.array([draw(st.integers(0, int(count))) for count in counts], dtype=np.int64)
    tables = np.arange(rows * 3, dtype=np.int64).reshape(rows, 3)
    tokens = np.arange(counts.sum(), dtype=np.int64)
    adapters = np.arange(rows, dtype=np.int64) if draw(st.booleans()) else np.zeros(0, dtype=np.int64)
    windows = tables + 1000 if draw(st.booleans()) else tables[:0]
    return Step(starts, counts, wanted, tables, tokens, 7, np.array([1, 2]), adapters, windows, np.array([3, 4]), 20)


def computed(step: Step) -> Computed:
    """Of each token: the row, known by its first block, its position, the token, and whether its logits are wanted."""
    rows, positions = step.positions()
    wanted = set(step.logit_rows().tolist())
    blocks = step.tables[:, 0][rows]
    return [
        (int(block), int(position), int(token), index in wanted)
        for index, (block, position, token) in enumerate(zip(blocks, positions, step.tokens, strict=True))
    ]


@given(step=steps(), stages=st.integers(1, 4), least=st.integers(1, 64))
@example(step=TWO_TOKENS, stages=2, least=1)
def test_parts_compute_the_tokens_of_the_step_in_their_order(step: Step, stages: int, least: int) -> None:
    parts = micro_batches(step, stages, least)
    assert [each for part in parts for each in computed(part)] == computed(step)
    assert [part.copies.tolist() for part in parts] == ([[1, 2]] if len(parts) == 1 else [[]] * len(parts))
    assert [part.window_copies.tolist() for part in parts] == ([[3, 4]] if len(parts) == 1 else [[]] * len(parts))
    adapters = {int(row[0]): int(task) for row, task in zip(step.tables, step.adapters, strict=False)}
    for part in parts:
        assert (part.length, part.candidates) == (7, 20)
        assert part.window_tables.tolist() == (part.tables + 1000).tolist()[: len(part.window_tables)]
        assert bool(len(part.window_tables)) is bool(len(step.window_tables))
        singles = part.generation_rows
        assert (part.counts[:singles] == 1).all()
        assert [adapters.get(int(row[0]), 0) for row in part.tables][: len(part.adapters)] == part.adapters.tolist()


@given(step=steps(), stages=st.integers(2, 4), least=st.integers(2, 64))
def test_parts_are_two_for_each_stage_of_about_equal_size(step: Step, stages: int, least: int) -> None:
    sizes = [len(part.tokens) for part in micro_batches(step, stages, least)]
    count = max(1, min(2 * stages, len(step.tokens) // least))
    assert len(sizes) <= count + 1
    assert max(sizes) <= -(-len(step.tokens) // count) + 1


def test_a_prompt_is_cut_into_chunks_that_follow_each_other() -> None:
    one, none = np.array([1]), np.array([0])
    step = Step(none + 100, one * 130, one, np.zeros((1, 8), dtype=np.int64), np.arange(130))
    parts = micro_batches(step, 2, 32)
    assert [(int(part.starts[0]), int(part.counts[0]), int(part.wanted[0])) for part in parts] == [
        (100, 33, 0),
        (133, 33, 0),
        (166, 33, 0),
        (199, 31, 1),
    ]


@given(step=steps())
def test_tokens_of_short_chunks_become_rows(step: Step) -> None:
    chunked = int(step.counts[step.counts > 1].sum())
    made = single_tokens(step)
    if not 0 < chunked <= MOST_CHUNKED:
        assert made is step
        return
    assert (made.counts == 1).all()
    wanted = set(step.logit_rows().tolist())
    order = sorted(range(len(step.tokens)), key=lambda token: token not in wanted)
    assert computed(made) == [computed(step)[token] for token in order]
    assert made.copies.tolist() == [1, 2]
    assert made.window_copies.tolist() == [3, 4]
    rows = step.positions()[0][order]
    assert made.adapters.tolist() == (step.adapters[rows].tolist() if len(step.adapters) else [])
    assert made.window_tables.tolist() == ((made.tables + 1000).tolist() if len(step.window_tables) else [])


def test_parts_of_a_step_that_draws_from_all_tokens_need_all_logits() -> None:
    step = replace(TWO_TOKENS, counts=ZERO + 90, wanted=ZERO + 1, tokens=np.arange(90), draws=np.arange(2))
    parts = micro_batches(step, 2, 8)
    assert len(parts) == 4
    assert [(part.candidates, len(part.draws)) for part in parts] == [(0, 0)] * 4
    assert micro_batches(step, 1, 8)[0] is step
