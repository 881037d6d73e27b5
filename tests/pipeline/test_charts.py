"""The geometry of the report's drawings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.pipeline import charts


@pytest.mark.parametrize(
    ("value", "top"), [(0, 1), (0.3, 0.5), (1, 1), (1.01, 2), (2.4, 2.5), (4169, 5000), (10, 10), (float("nan"), 1)]
)
def test_axes_end_at_a_round_number(value: float, top: float) -> None:
    assert charts.nice_ceiling(value) == pytest.approx(top)


@given(st.floats(1e-9, 1e15))
def test_the_end_of_an_axis_is_near_the_largest_value(value: float) -> None:
    assert value * (1 - 1e-9) <= charts.nice_ceiling(value) <= 2.5 * value * (1 + 1e-9)


def test_a_curve_stays_in_its_drawing() -> None:
    found = charts.curve("x", "ms", [(1, 3.0), (4, 5.0), (6, 9.9)])
    assert len(found.points.split()) == 3
    assert [mark.text for mark in found.marks] == ["1 concurrent: 3 ms", "4 concurrent: 5 ms", "6 concurrent: 9.9 ms"]
    assert all(0 <= mark.x <= charts.CURVE_WIDTH and 0 <= mark.y <= charts.CURVE_HEIGHT for mark in found.marks)
    assert [tick.text for tick in found.x_ticks] == ["1", "2", "4"]
    assert [tick.text for tick in found.y_ticks] == ["0", "2.5", "5", "7.5", "10"]
    assert found.marks[0].x < found.marks[1].x < found.marks[2].x
    assert found.marks[0].y > found.marks[1].y > found.marks[2].y


def test_a_curve_of_one_point_is_drawn() -> None:
    (mark,) = charts.curve("x", "ms", [(1, 0.0)]).marks
    assert (mark.x, mark.y) == (44, charts.CURVE_HEIGHT - 26)


def test_bars_are_in_proportion_and_one_is_strong() -> None:
    found = charts.bars([("a", 1.0), ("b", 4.0), ("c", -1.0)], strong=1)
    assert found.top == 4
    assert [bar.height for bar in found.bars] == [25, 100, 0]
    assert [bar.height for bar in charts.bars([("a", 0.0), ("b", -1.0)]).bars] == [0, 0]
    assert [bar.strong for bar in found.bars] == [False, True, False]
    assert found.width == 30


def test_pieces_of_a_stack_are_side_by_side() -> None:
    found = charts.stack({"weights": 30, "kv_pool": 50}, 100)
    assert [(piece.x, piece.width) for piece in found] == [(0, 300), (300, 500)]


def test_shares_are_of_the_largest() -> None:
    assert charts.shares([1.0, 2.0, None, -3.0]) == (50, 100, 0, 0)
    assert charts.shares([None]) == (0,)
    assert charts.shares([]) == ()
