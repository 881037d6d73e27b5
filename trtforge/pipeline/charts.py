"""Floor 5: the geometry of the report's drawings. Coordinates are SVG user units; the templates only print them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log2, log10

from trtforge.core.figures import number

CURVE_WIDTH, CURVE_HEIGHT = 320, 176
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 12, 26
BAR_PITCH, BAR_HEIGHT = 10, 100
STACK_WIDTH = 1000
_STEPS = (1, 2, 2.5, 5, 10)
_MOST_TICKS = 8


@dataclass(frozen=True)
class Tick:
    """A position on an axis and its text."""

    at: float
    text: str


@dataclass(frozen=True)
class Mark:
    """A point of a curve and its label."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Curve:
    """One quantity over a logarithmic axis; `points`: in the syntax of SVG's polyline."""

    title: str
    unit: str
    points: str
    marks: tuple[Mark, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def curve(title: str, unit: str, values: Sequence[tuple[int, float]]) -> Curve:
    """A curve of (concurrency, value) pairs; concurrencies start at 1."""
    most = max(x for x, _ in values)
    top = nice_ceiling(max(y for _, y in values))
    doublings = log2(most) or 1.0

    def across(x: float) -> float:
        return round(_LEFT + (CURVE_WIDTH - _LEFT - _RIGHT) * log2(x) / doublings, 1)

    def down(y: float) -> float:
        return round(CURVE_HEIGHT - _BOTTOM - (CURVE_HEIGHT - _TOP - _BOTTOM) * y / top, 1)

    marks = tuple(Mark(across(x), down(y), f"{x} concurrent: {number(y)} {unit}") for x, y in values)
    powers = [1 << bit for bit in range(most.bit_length()) if 1 << bit <= most]
    every = -(-len(powers) // _MOST_TICKS)
    return Curve(
        title=title,
        unit=unit,
        points=" ".join(f"{mark.x:g},{mark.y:g}" for mark in marks),
        marks=marks,
        x_ticks=tuple(Tick(across(power), str(power)) for power in powers[::every]),
        y_ticks=tuple(Tick(down(top * part / 4), number(top * part / 4)) for part in range(5)),
    )


def nice_ceiling(value: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `value`; 1 for zero."""
    if not isfinite(value) or value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in _STEPS if step * power >= value * (1 - 1e-12))


@dataclass(frozen=True)
class BarMark:
    """One bar: its left edge, top and height; `strong`: highlighted."""

    x: float
    y: float
    height: float
    text: str
    strong: bool = False


@dataclass(frozen=True)
class Bars:
    """Vertical bars from zero; `top` is the value at full height."""

    bars: tuple[BarMark, ...]
    top: float

    @property
    def width(self) -> int:
        """Width of the drawing."""
        return BAR_PITCH * len(self.bars)


def bars(values: Sequence[tuple[str, float]], strong: int | None = None) -> Bars:
    """Bars of (text, value) pairs, the largest at full height; `strong`: the index of the highlighted bar.

    Bars of negative values have no height.
    """
    top = max((value for _, value in values if isfinite(value)), default=0.0)
    found = []
    for index, (text, value) in enumerate(values):
        height = round(BAR_HEIGHT * min(1.0, max(0.0, value) / top), 2) if top > 0 else 0.0
        found.append(BarMark(index * BAR_PITCH + 1, round(BAR_HEIGHT - height, 2), height, text, index == strong))
    return Bars(tuple(found), top)


@dataclass(frozen=True)
class Piece:
    """A piece of a stacked bar."""

    name: str
    x: float
    width: float
    amount: int


def stack(parts: Mapping[str, int], whole: int) -> tuple[Piece, ...]:
    """Parts side by side in a bar of STACK_WIDTH units that stands for `whole`."""
    found, x = [], 0.0
    for name, amount in parts.items():
        width = STACK_WIDTH * amount / whole if whole else 0.0
        found.append(Piece(name, round(x, 2), round(width, 2), amount))
        x += width
    return tuple(found)


def shares(values: Sequence[float | None]) -> tuple[float, ...]:
    """Each value as a percentage of the largest; 0 for None and for values below zero."""
    largest = max((value for value in values if value is not None), default=0.0)
    return tuple(0.0 if not value or largest <= 0 else round(max(0.0, 100 * value / largest), 1) for value in values)
