"""Tensor-parallel cuts of one source tensor: which rows and columns each rank gets.

Source: tensorrt_llm/models/convert_utils.py (`split`, `dup_kv_weight`) and layers/embedding.py, 0.17.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """A rectangle of a (rows, columns) tensor; a vector has one column."""

    rows: range
    cols: range


def replicated_cuts(shape: tuple[int, ...], tp: int) -> tuple[Cut, ...]:
    """Everything, on every rank."""
    return (Cut(range(shape[0]), _columns(shape)),) * tp


def column_cuts(shape: tuple[int, ...], tp: int, rows_each: int | None = None) -> tuple[Cut, ...]:
    """Rows in contiguous shares of `rows_each` (default rows / tp); the last share is short where rows run out."""
    share = rows_each if rows_each is not None else shape[0] // tp
    ends = [min(shape[0], share * rank) for rank in range(tp + 1)]
    return tuple(Cut(range(ends[rank], ends[rank + 1]), _columns(shape)) for rank in range(tp))


def row_cuts(shape: tuple[int, ...], tp: int) -> tuple[Cut, ...]:
    """Columns in contiguous shares."""
    share = shape[1] // tp
    return tuple(Cut(range(shape[0]), range(share * rank, share * (rank + 1))) for rank in range(tp))


def head_cuts(shape: tuple[int, ...], heads: int, head_size: int, tp: int) -> tuple[Cut, ...]:
    """Whole heads: heads / tp each, or where there are fewer heads than ranks, head `rank * heads // tp`."""
    if heads >= tp:
        return column_cuts(shape, tp, rows_each=heads // tp * head_size)
    firsts = [rank * heads // tp * head_size for rank in range(tp)]
    return tuple(Cut(range(first, first + head_size), _columns(shape)) for first in firsts)


def _columns(shape: tuple[int, ...]) -> range:
    return range(shape[1] if len(shape) > 1 else 1)
