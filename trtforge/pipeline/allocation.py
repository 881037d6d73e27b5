"""Floor 5: one format for each group of linear layers, so that the least damage remains within a budget of bits.

A multiple-choice knapsack. Greedy along each group's lower convex hull solves its linear relaxation exactly (Sinha and
Zoltners, 1979), so the relaxation's value bounds what any choice can reach; the reported gap is the distance from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtforge.core.recipe import QuantFormat


@dataclass(frozen=True)
class Option:
    """A format of one group: `bits` of all its weights, and the `loss` that remains, its squared damage."""

    format: QuantFormat
    bits: float
    loss: float


@dataclass(frozen=True)
class Allocation:
    """The format of each group in order, with their total `bits` and `loss`. `bound`: no choice has a smaller loss."""

    formats: tuple[QuantFormat, ...]
    bits: float
    loss: float
    bound: float


def allocate(groups: Sequence[Sequence[Option]], budget: float) -> Allocation | None:
    """Choose an option for each group within `budget` bits; None if even the cheapest ones need more."""
    hulls = [_hull(options) for options in groups]
    chosen, left = [0] * len(hulls), budget - sum(hull[0].bits for hull in hulls)
    if left < 0:
        return None
    bound, relaxed = sum(hull[0].loss for hull in hulls), left
    steps = [(_gain(hull, step), group, step) for group, hull in enumerate(hulls) for step in range(1, len(hull))]
    for gain, group, step in sorted(steps, key=lambda each: -each[0]):
        hull = hulls[group]
        cost = hull[step].bits - hull[step - 1].bits
        share = min(1.0, relaxed / cost)
        bound -= share * gain * cost
        relaxed -= share * cost
        if chosen[group] == step - 1 and cost <= left:
            chosen[group], left = step, left - cost
    picked = _improved(groups, [hull[step] for hull, step in zip(hulls, chosen, strict=True)], left)
    loss = sum(option.loss for option in picked)
    formats = tuple(option.format for option in picked)
    return Allocation(formats, sum(option.bits for option in picked), loss, min(loss, max(0.0, bound)))


def _gain(hull: Sequence[Option], step: int) -> float:
    """Loss saved per extra bit by a step up the hull."""
    return (hull[step - 1].loss - hull[step].loss) / (hull[step].bits - hull[step - 1].bits)


def _hull(options: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull of loss over bits, by increasing bits."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda each: (each.bits, each.loss)):
        if hull and (option.loss >= hull[-1].loss or option.bits == hull[-1].bits):
            continue
        hull.append(option)
        while len(hull) > 2 and _gain(hull, len(hull) - 2) < _gain(hull, len(hull) - 1):
            del hull[-2]
    return hull


def _improved(groups: Sequence[Sequence[Option]], picked: list[Option], left: float) -> list[Option]:
    """Spend the remaining bits on changes of single groups, the most useful first."""
    while True:
        changes = [
            (picked[group].loss - option.loss, group, option)
            for group, options in enumerate(groups)
            for option in options
            if option.loss < picked[group].loss and option.bits - picked[group].bits <= left
        ]
        if not changes:
            return picked
        _, group, option = max(changes, key=lambda change: change[0])
        left -= option.bits - picked[group].bits
        picked[group] = option


def counted(formats: Sequence[QuantFormat], weights: Sequence[int]) -> Mapping[QuantFormat, int]:
    """Number of weights in each format."""
    found: dict[QuantFormat, int] = {}
    for quant, count in zip(formats, weights, strict=True):
        found[quant] = found.get(quant, 0) + count
    return found
