"""Choices of the next measurement and of the best settings: pure functions of measured figures."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from trtforge.core.config_model import Config
from trtforge.tune.goal import Goal, Point

Verdict = Literal["better", "no difference", "worse", "too few repetitions"]
LEAST_REPETITIONS = 3
"""With three each, all repetitions of one side are better by chance only once in 20; fewer would decide less surely."""
MOST_FINALISTS = 2
"""The most variants that are repeated."""
_HOPELESS = 0.75  # of the score to beat: single measurements on a busy machine differ by less
_FALLING = 0.95  # of a variant's own best score
_FINE = 8  # a load is narrowed down until the step is 1/8 of it


class Comparison(Config, allow_inf_nan=False):
    """Alternating repetitions of a variant and the present settings: scores of the goal, more is better.

    `gain`: difference of the medians relative to the present one; None if the present median is 0, as it breaks a
    limit.
    """

    present: tuple[float, ...]
    variant: tuple[float, ...]
    gain: float | None
    verdict: Verdict


def next_level(levels: Sequence[int], points: Sequence[Point], goal: Goal, bar: Point | None) -> int | None:
    """The next load to measure with a variant; None if no other load can win.

    `bar`: the best point of the present settings; None while these are measured, or if all their points break a limit.
    Loads increase until a limit breaks. A variant begins with the load of `bar` and ends there if it is clearly worse.
    """
    rising = sorted(set(levels))
    if bar is None:
        if points and not goal.keeps(points[-1]):
            return None
        return next((level for level in rising if level not in {point.concurrency for point in points}), None)
    if not points:
        return bar.concurrency
    last = points[-1]
    if is_hopeless(points, goal, bar) or goal.score(last) < _FALLING * max(map(goal.score, points)):
        return None
    return next((level for level in rising if level > last.concurrency), None)


def is_hopeless(points: Sequence[Point], goal: Goal, bar: Point) -> bool:
    """Whether all points are clearly worse than `bar`, or break a limit."""
    return max(map(goal.score, points)) < _HOPELESS * goal.score(bar)


def finalists(goal: Goal, bar: Point | None, measured: Mapping[str, Sequence[Point]]) -> list[str]:
    """The names of the variants to repeat, the best first: those that are not clearly worse."""
    least = _HOPELESS * goal.score(bar) if bar is not None else 0.0
    scores = {name: goal.score(best) for name, points in measured.items() if (best := goal.best(points)) is not None}
    near = [name for name in scores if scores[name] >= least]
    return sorted(near, key=lambda name: -scores[name])[:MOST_FINALISTS]


def compare(present: Sequence[float], variant: Sequence[float]) -> Comparison:
    """A variant is better only if each of its repetitions is better than each repetition of the present settings."""
    repetitions = min(len(present), len(variant))
    verdict: Verdict = "no difference"
    if repetitions < LEAST_REPETITIONS:
        verdict = "too few repetitions"
    elif min(variant) > max(present):
        verdict = "better"
    elif max(variant) < min(present):
        verdict = "worse"
    usual = statistics.median(present) if present else 0.0
    gain = round(statistics.median(variant) / usual - 1, 4) if usual and variant else None
    return Comparison(present=tuple(present), variant=tuple(variant), gain=gain, verdict=verdict)


def winner(comparisons: Mapping[str, Comparison]) -> str | None:
    """The variant with the highest median among the better ones; None: keep the present settings."""
    better = {name: found for name, found in comparisons.items() if found.verdict == "better"}
    return max(better, key=lambda name: statistics.median(better[name].variant), default=None)


def highest_load(points: Sequence[Point], goal: Goal) -> int | None:
    """The highest measured load up to which every measurement keeps the limits; None if the lowest breaks one."""
    broken = min((point.concurrency for point in points if not goal.keeps(point)), default=None)
    kept = {point.concurrency for point in points if goal.keeps(point)}
    return max((load for load in kept if broken is None or load < broken), default=None)


def load_between(points: Sequence[Point], goal: Goal) -> int | None:
    """A load between the highest that keeps the limits and the lowest that breaks one; None if they are close."""
    low = highest_load(points, goal) or 0
    high = min((point.concurrency for point in points if not goal.keeps(point)), default=None)
    if high is None or high - low <= max(1, low // _FINE):
        return None
    return (low + high) // 2
