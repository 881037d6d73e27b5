"""Cuts cover what they must: every row once, KV heads repeated in order."""

from hypothesis import given
from hypothesis import strategies as st

from trtforge.models.split import column_cuts, head_cuts, row_cuts


@given(tp=st.integers(1, 8), each=st.integers(1, 9), columns=st.integers(1, 9))
def test_column_cuts_are_a_partition(tp: int, each: int, columns: int) -> None:
    cuts = column_cuts((tp * each, columns), tp)
    assert [row for cut in cuts for row in cut.rows] == list(range(tp * each))
    assert all(cut.cols == range(columns) for cut in cuts)


@given(tp=st.integers(1, 8), vocab=st.integers(1, 50))
def test_padded_cuts_are_a_partition(tp: int, vocab: int) -> None:
    each = -(-vocab // tp)
    cuts = column_cuts((vocab, 4), tp, rows_each=each)
    assert [row for cut in cuts for row in cut.rows] == list(range(vocab))
    assert all(len(cut.rows) <= each for cut in cuts)


@given(tp=st.integers(1, 8), each=st.integers(1, 9))
def test_row_cuts_are_a_partition(tp: int, each: int) -> None:
    cuts = row_cuts((3, tp * each), tp)
    assert [column for cut in cuts for column in cut.cols] == list(range(tp * each))


def test_fewer_kv_heads_than_ranks_are_repeated_in_order() -> None:
    cuts = head_cuts((2 * 16, 8), heads=2, head_size=16, tp=4)
    assert [cut.rows for cut in cuts] == [range(16), range(16), range(16, 32), range(16, 32)]
