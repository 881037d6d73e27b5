"""Which rows of its Hugging Face module a part of a row has, and a tensor-parallel rank's rows of them.

Conversion cuts weights by these rows, the embedded engine LoRA's matrices B of the same layers.
"""

from collections.abc import Callable

from trtforge.models.family import Grouped, Linear, Part, PerHead, Sizes, Split, Stacked
from trtforge.models.split import Cut, column_cuts, head_cuts, row_cuts, whole_cuts


def part_cuts(sizes: Sizes, row: Linear, part: Part, columns: int, tp: int) -> tuple[Cut, ...]:
    """Each rank's cut of a part; `columns`: number of the module's inputs."""
    match row.split:
        case Split.HEADS:
            return head_cuts(_head_rows(sizes, part), sizes.heads_of(part.out), columns, tp)
        case Split.COLUMN:
            return column_cuts(part_rows(sizes, part), columns, tp)
        case Split.ROW:
            return row_cuts(part_rows(sizes, part), columns, tp)
        case _:
            return whole_cuts((part_rows(sizes, part),), columns, tp)


def part_rows(sizes: Sizes, part: Part) -> range:
    """The contiguous rows of a part in its module."""
    assert not isinstance(part.rows, Grouped | PerHead), f"{part.module}: its rows are spread over heads"
    first = sizes.total(part.rows.before) if part.rows else 0
    return range(first, first + sizes.of(part.out))


def module_rows(sizes: Sizes, part: Part) -> int:
    """Number of rows of the whole module."""
    match part.rows:
        case Stacked(of=of) | PerHead(of=of):
            return sizes.total(of)
        case Grouped():
            return sizes.total(("q", "kv", "kv"))
        case None:
            return sizes.of(part.out)


def _head_rows(sizes: Sizes, part: Part) -> Callable[[int], range]:
    """A function that gives a head's rows of this part in its module."""
    heads = sizes.heads_of(part.out)
    size = sizes.of(part.out) // heads
    match part.rows:
        case Grouped(which=which):
            queries = sizes.num_heads // sizes.num_kv_heads
            block = (queries + 2) * size
            if which == "q":
                return lambda head: _span(head // queries * block + head % queries * size, size)
            offset = (queries + (which == "v")) * size
            return lambda head: _span(head * block + offset, size)
        case PerHead(before=before, of=of):
            stride, offset = sizes.total(of) // heads, sizes.total(before) // heads
            return lambda head: _span(head * stride + offset, size)
        case _:
            first = part_rows(sizes, part).start
            return lambda head: _span(first + head * size, size)


def _span(first: int, length: int) -> range:
    return range(first, first + length)
