"""Cuts cover what they must: every row once, KV heads repeated in order, every expert in one group."""

from hypothesis import given
from hypothesis import strategies as st

from trtforge.models.expert_split import expert_cuts
from trtforge.models.split import Cut, column_cuts, head_cuts, joined, row_cuts


def rows_of(cut: Cut) -> list[int]:
    return [row for rows in cut.rows for row in rows]


@given(tp=st.integers(1, 8), each=st.integers(1, 9), columns=st.integers(1, 9), first=st.integers(0, 5))
def test_column_cuts_are_a_partition(tp: int, each: int, columns: int, first: int) -> None:
    cuts = column_cuts(range(first, first + tp * each), columns, tp)
    assert [row for cut in cuts for row in rows_of(cut)] == list(range(first, first + tp * each))
    assert all(cut.cols == range(columns) and cut.height == each for cut in cuts)


@given(tp=st.integers(1, 8), vocab=st.integers(1, 50))
def test_padded_cuts_are_a_partition(tp: int, vocab: int) -> None:
    each = -(-vocab // tp)
    cuts = column_cuts(range(vocab), 4, tp, rows_each=each)
    assert [row for cut in cuts for row in rows_of(cut)] == list(range(vocab))
    assert all(cut.height <= each for cut in cuts)


@given(tp=st.integers(1, 8), each=st.integers(1, 9))
def test_row_cuts_are_a_partition(tp: int, each: int) -> None:
    cuts = row_cuts(range(3), tp * each, tp)
    assert [column for cut in cuts for column in cut.cols] == list(range(tp * each))


@given(tp=st.sampled_from([1, 2, 4]), size=st.integers(1, 5), gap=st.integers(0, 3))
def test_heads_apart_are_a_partition(tp: int, size: int, gap: int) -> None:
    """Heads that do not follow one another, as in a fused [q k v] of every head."""
    stride = size + gap
    cuts = head_cuts(lambda head: range(head * stride, head * stride + size), 4, 7, tp)
    wanted = [head * stride + row for head in range(4) for row in range(size)]
    assert [row for cut in cuts for row in rows_of(cut)] == wanted


def test_fewer_kv_heads_than_ranks_are_repeated_in_order() -> None:
    cuts = head_cuts(lambda head: range(head * 16, head * 16 + 16), heads=2, columns=8, tp=4)
    assert [cut.rows for cut in cuts] == [(range(16),), (range(16),), (range(16, 32),), (range(16, 32),)]


@given(ep=st.sampled_from([1, 2, 4]), shares=st.sampled_from([1, 2]), experts=st.sampled_from([4, 8]))
def test_each_expert_is_whole_in_one_group(ep: int, shares: int, experts: int) -> None:
    """Rank t is of group t % ep; groups hold consecutive experts."""
    for expert in range(experts):
        shared = column_cuts(range(6), 3, shares)
        cuts = expert_cuts(expert, experts, shared, ep)
        holders = [rank for rank, cut in enumerate(cuts) if cut.rows]
        assert holders == [rank for rank in range(shares * ep) if rank % ep == expert * ep // experts]
        assert [row for rank in holders for row in rows_of(cuts[rank])] == list(range(6))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_joining_keeps_the_rows(lengths: list[int]) -> None:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    parts = tuple(range(end - length, end) for end, length in zip(ends, lengths, strict=True))
    assert joined(parts) == (range(ends[-1]),)
    apart = tuple(range(2 * part.start + 1, 2 * part.start + 2) for part in parts)
    assert joined(apart) == apart
