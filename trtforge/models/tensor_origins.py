"""The inverse of conversion: where each row of a Hugging Face tensor is stored in the rank files.

It is derived from the plan that conversion executes, so checkpoints of other tools can also be compared tensor by
tensor. Tensors computed from several sources (MLA's absorbed query) have no inverse.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trtforge.formats.shards import TensorSpec
from trtforge.models.checkpoint_plan import CheckpointPlan, Layout
from trtforge.models.content import Cast, Piece


@dataclass(frozen=True)
class Origin:
    """Rows `rows` and columns `cols` of a source's (out, in) matrix are rows [first, first + len(rows)) of a target.

    `rank` is the rank file's index; rows of a three-dimensional target are numbered through all experts.
    """

    piece: Piece
    rows: range
    cols: range
    rank: int
    target: TensorSpec
    first: int
    plus_one: bool


def origins(plan: CheckpointPlan, layout: Layout) -> Iterator[Origin]:
    """All origins, in the order of the rank files' tensors; one for each rank with the rows."""
    tp = layout.parallel.tp
    for target in plan.targets:
        if not isinstance(target.content, Cast):
            continue
        for tp_rank in range(tp):
            first = 0
            for piece in target.content.pieces:
                cut = piece.cuts[tp_rank]
                for rows in cut.rows:
                    rank = target.pp_rank * tp + tp_rank
                    yield Origin(piece, rows, cut.cols, rank, target.spec, first, target.content.plus_one)
                    first += len(rows)
