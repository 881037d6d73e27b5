"""Figures for display: sizes, durations, counts of parameters; None is a dash."""

import time
from collections.abc import Callable, Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB")
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
ABSENT = "-"
ROUNDED_UP = 999.5
"""From this value, three significant digits round to 1,000, which Python writes as 1e+03."""


def size(count: int | None) -> str:
    """Bytes in decimal units with three significant digits: 4.07 MB."""
    if count is None:
        return ABSENT
    value, unit = float(count), 0
    while value >= ROUNDED_UP and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}" if value < ROUNDED_UP else f"{value:.0f} {_UNITS[unit]}"


def duration(seconds: float | None) -> str:
    """0.1 s, 42.3 s, 3 min 20 s, 2 h 05 min."""
    if seconds is None:
        return ABSENT
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def moment(seconds: float) -> str:
    """Seconds since 1970 as a moment in UTC: 2026-11-27T18:24:49Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def parameters(count: int | None) -> str:
    """4.2 M, 8.03 B, 405 B."""
    if count is None:
        return ABSENT
    for scale, letter in _COUNTS:
        if count >= ROUNDED_UP * scale / 1000:
            return f"{count / scale:.3g} {letter}"
    return str(count)


def counted(count: int, one: str, many: str | None = None) -> str:
    """1 file, 1,200 files, 2 processes."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """The first `most` names and the number of others: a, b and 7 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def ratio(times: float | None) -> str:
    """A ratio of sizes as text: 1.76 times smaller, the same size, 1.02 times larger."""
    if times is None:
        return ABSENT
    if round(times, 2) == 1 or times <= 0:
        return "the same size"
    return f"{times:.3g} times smaller" if times > 1 else f"{1 / times:.3g} times larger"


def change(relative: float | None) -> str:
    """A relative change with its sign: +0.40%; +0.00% if it rounds to zero."""
    return ABSENT if relative is None else f"{round(relative, 4) + 0.0:+.2%}"


def share(value: float | None) -> str:
    """A share: 93.28%."""
    return ABSENT if value is None else f"{value:.2%}"


def perplexity(value: float | None) -> str:
    """A perplexity with three decimals; with three digits if huge."""
    if value is None:
        return ABSENT
    return f"{value:.3f}" if value < 1e5 else f"{value:.3g}"


def number(value: float | None, digits: int = 4) -> str:
    """A number with `digits` significant digits."""
    return ABSENT if value is None else f"{value:.{digits}g}"


def nats(value: float | None) -> str:
    """A KL divergence in nats with three significant digits, without the unit."""
    return number(value, 3)


def interval(bounds: tuple[float, float] | None, figure: Callable[[float], str]) -> str:
    """A 95 % interval, each end as `figure` writes it: 0.0021 to 0.0034."""
    return ABSENT if bounds is None else " to ".join(map(figure, bounds))
