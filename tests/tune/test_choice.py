"""What is measured next and what wins, by given figures."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tune.points import point
from trtforge.tune.choice import (
    LEAST_REPETITIONS,
    Comparison,
    compare,
    finalists,
    highest_load,
    load_between,
    next_level,
    winner,
)
from trtforge.tune.goal import Goal, Point, at_percentile

FAST = Goal()
LIMITED = Goal(ttft=100)
LEVELS = (1, 4, 16, 32)
positive = st.floats(0.1, 1e6)
points = st.builds(point, st.integers(1, 64), positive, positive, positive, positive)
goals = st.builds(
    Goal,
    objective=st.sampled_from(["throughput", "latency"]),
    ttft=st.none() | st.floats(1, 1e6),
    token_latency=st.none() | st.floats(1, 1e6),
)


def test_a_percentile_is_the_nearest_rank() -> None:
    assert at_percentile([3, 1, 2], 100) == 3
    assert at_percentile([3, 1, 2], 1) == 1
    assert at_percentile([4, 3, 2, 1], 50) == 2
    assert at_percentile(range(1, 101), 95) == 95


@given(st.lists(positive, min_size=1), st.floats(0.1, 100))
def test_so_many_values_do_not_exceed_a_percentile(values: list[float], percentile: float) -> None:
    found = at_percentile(values, percentile)
    assert found in values
    assert sum(value <= found for value in values) >= percentile / 100 * len(values) - 1e-6


def test_a_broken_limit_scores_nothing() -> None:
    goal = Goal(ttft=100, token_latency=5)
    assert goal.score(point(1, 40, first=100, each=5)) == 40
    assert goal.score(point(1, 40, first=101)) == goal.score(point(1, 40, each=5.1)) == 0
    assert Goal(objective="latency").score(point(1, answer=50)) == 20


def test_the_best_load_of_a_goal() -> None:
    found = [point(1, 50, answer=10), point(8, 90, answer=30), point(32, 80, first=200, answer=99)]
    assert FAST.best(found) == found[1]
    assert Goal(objective="latency").best(found) == found[2]
    assert Goal(objective="latency", ttft=100).best(found) is None
    assert Goal(ttft=1).best(found) is None
    assert FAST.best([]) is None


def test_present_settings_rise_until_a_limit_breaks() -> None:
    assert next_level(LEVELS, [], LIMITED, None) == 1
    assert next_level(LEVELS, [point(1), point(4)], LIMITED, None) == 16
    assert next_level(LEVELS, [point(1), point(4, first=101)], LIMITED, None) is None
    assert next_level(LEVELS, [point(level) for level in LEVELS], FAST, None) is None


def test_a_variant_begins_where_the_present_settings_were_best() -> None:
    bar = point(4, 100)
    assert next_level(LEVELS, [], FAST, bar) == 4
    assert next_level(LEVELS, [point(4, 74)], FAST, bar) is None  # clearly worse
    assert next_level(LEVELS, [point(4, 76)], FAST, bar) == 16
    assert next_level(LEVELS, [point(4, 110), point(16, 100)], FAST, bar) is None  # falling
    assert next_level(LEVELS, [point(4, 110), point(16, 120)], FAST, bar) == 32
    assert next_level(LEVELS, [point(4, 500, first=101)], LIMITED, bar) is None


@given(st.sets(st.integers(1, 64), min_size=1), goals, st.none() | points, st.lists(points, min_size=80, max_size=80))
def test_each_load_is_measured_once_at_most(
    levels: set[int], goal: Goal, bar: Point | None, figures: list[Point]
) -> None:
    measured: list[Point] = []
    while (level := next_level(sorted(levels), measured, goal, bar)) is not None:
        assert level in levels or (bar is not None and level == bar.concurrency)
        measured.append(figures[len(measured)].model_copy(update={"concurrency": level}))
    loads = [found.concurrency for found in measured]
    assert loads == sorted(set(loads))


def test_the_best_variants_are_repeated() -> None:
    measured = {
        "a": [point(4, 120)],
        "b": [point(4, 99), point(16, 130)],
        "c": [point(4, 100)],
        "d": [],
        "e": [point(4, 125)],
    }
    assert finalists(FAST, point(4, 100), measured) == ["b", "e"]
    near = {"c": measured["c"], "f": [point(4, 76)], "g": [point(4, 74)]}
    assert finalists(FAST, point(4, 100), near) == ["c", "f"]
    assert finalists(FAST, point(4, 100), {"g": near["g"]}) == []
    assert finalists(FAST, None, {"c": [point(4, 100)]}) == ["c"]  # no present load keeps the limits
    assert finalists(LIMITED, None, {"c": [point(4, 100, first=101)]}) == []


@pytest.mark.parametrize(
    ("present", "variant", "verdict", "gain"),
    [
        ((100, 104, 98), (110, 105, 120), "better", 0.1),
        ((100, 104, 98), (110, 103, 120), "no difference", 0.1),
        ((100, 104, 98), (90, 97, 80), "worse", -0.1),
        ((100, 104), (110, 120), "too few repetitions", 0.1275),
        ((), (), "too few repetitions", None),
        ((0, 0, 0), (5, 5, 5), "better", None),
    ],
)
def test_a_variant_is_better_if_each_repetition_is(
    present: tuple[float, ...], variant: tuple[float, ...], verdict: str, gain: float | None
) -> None:
    found = compare(present, variant)
    assert (found.verdict, found.gain) == (verdict, gain)


def test_noise_alone_seldom_recommends_a_change() -> None:
    """Of all orders of as many equal repetitions as are asked by default, one in 70 has all of one side first."""
    orders = [order[:4] for order in permutations(range(1, 9))]
    better = [order for order in orders if min(order) > 4]
    assert len(better) * 70 == len(orders)
    assert LEAST_REPETITIONS == 3


@given(st.lists(positive, max_size=6), st.lists(positive, max_size=6))
def test_a_comparison_turned_round_says_the_opposite(present: list[float], variant: list[float]) -> None:
    opposite = {"better": "worse", "worse": "better"}
    verdict = compare(present, variant).verdict
    assert compare(variant, present).verdict == opposite.get(verdict, verdict)


def test_the_winner_is_the_best_of_the_better_ones() -> None:
    def found(verdict: str, *scores: float) -> Comparison:
        return Comparison.model_validate({"present": (1,), "variant": scores, "gain": None, "verdict": verdict})

    named = {"a": found("better", 5, 6, 7), "b": found("no difference", 9, 9), "c": found("better", 7, 8, 9)}
    assert winner(named) == "c"
    assert winner({"b": named["b"]}) is None
    assert winner({}) is None


def test_the_highest_load_keeps_the_limits_in_every_measurement() -> None:
    found = [point(1), point(8), point(32, first=200), point(8)]
    assert highest_load(found, LIMITED) == 8
    assert highest_load([*found, point(8, first=101)], LIMITED) == 1
    assert highest_load([point(1, first=101), point(4)], LIMITED) is None
    assert load_between(found, LIMITED) == 20
    assert load_between([point(8), point(9, first=101)], LIMITED) is None
    assert load_between([point(8), point(32)], LIMITED) is None


@given(st.integers(0, 200), st.integers(1, 200))
def test_a_load_is_narrowed_down_to_the_limit(bearable: int, highest: int) -> None:
    """A server that bears so many at once: what is found is at most an eighth below it."""
    found = [point(highest, first=1 if highest <= bearable else 101)]
    while (load := load_between(found, LIMITED)) is not None:
        assert load not in {each.concurrency for each in found}
        found.append(point(load, first=1 if load <= bearable else 101))
    least = min(bearable, highest)
    assert (highest_load(found, LIMITED) or 0) <= least <= (highest_load(found, LIMITED) or 0) * 9 / 8 + 1
