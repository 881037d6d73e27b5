"""Tensor-parallel cuts of one source matrix: which rows and columns each rank gets.

Source: tensorrt_llm/models/convert_utils.py (`split`, `dup_kv_weight`), layers/embedding.py and mapping.py, 0.17.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Cut:
    """Ascending row ranges, and one column range, of a (rows, columns) matrix; a vector has one column."""

    rows: tuple[range, ...]
    cols: range

    @property
    def height(self) -> int:
        """Number of rows."""
        return sum(len(rows) for rows in self.rows)


def whole_cuts(rows: tuple[range, ...], columns: int, tp: int) -> tuple[Cut, ...]:
    """All of these rows, on every rank."""
    return (Cut(joined(rows), range(columns)),) * tp


def column_cuts(rows: range, columns: int, tp: int, rows_each: int | None = None) -> tuple[Cut, ...]:
    """Rows in contiguous shares of `rows_each` (default rows / tp); the last shares are shorter if rows run out."""
    share = rows_each if rows_each is not None else len(rows) // tp
    ends = [min(rows.stop, rows.start + share * rank) for rank in range(tp + 1)]
    return tuple(Cut((range(start, stop),) if start < stop else (), range(columns)) for start, stop in pairwise(ends))


def row_cuts(rows: range, columns: int, tp: int) -> tuple[Cut, ...]:
    """Columns in contiguous shares."""
    share = columns // tp
    return tuple(Cut((rows,), range(share * rank, share * (rank + 1))) for rank in range(tp))


def head_cuts(rows_of: Callable[[int], range], heads: int, columns: int, tp: int) -> tuple[Cut, ...]:
    """Whole heads: heads / tp each, or with fewer heads than ranks, head `rank * heads // tp`.

    `rows_of` gives the rows of a head; heads need not be contiguous.
    """
    each = max(1, heads // tp)
    firsts = [rank * heads // tp for rank in range(tp)]
    return tuple(Cut(joined(tuple(rows_of(first + n) for n in range(each))), range(columns)) for first in firsts)


def joined(rows: tuple[range, ...]) -> tuple[range, ...]:
    """The same rows, with adjacent ranges merged."""
    found: list[range] = []
    for part in rows:
        if found and found[-1].stop == part.start:
            found[-1] = range(found[-1].start, part.stop)
        else:
            found.append(part)
    return tuple(found)
