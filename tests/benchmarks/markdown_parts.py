"""What the tables of the benchmarks are made of."""

import textwrap
from collections.abc import Iterable, Sequence

from tests.benchmarks.record import Measured, Place


def where(place: Place, what: str = "") -> str:
    """The lines above a table."""
    words = [place.machine, place.software]
    if isinstance(place, Measured):
        words.append(f"medians of {place.runs} interleaved runs" if place.runs > 1 else "one run")
    return wrapped(what + "; ".join(words) + ".") + "\n\n"


def wrapped(text: str) -> str:
    """In lines of 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [" | ".join(columns), "|".join("---" for _ in columns), *(" | ".join(row) for row in rows)]
    return "\n".join(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines)


def by_machine(name: str, tables: Iterable[str]) -> str:
    """The tables of one benchmark on several machines."""
    return "\n\n".join(tables) or f"Not recorded yet: `python -m tests.benchmarks {name}` measures and records it."
