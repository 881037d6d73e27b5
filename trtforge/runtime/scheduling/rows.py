"""The part of one sequence that a step computes."""

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from trtforge.models.kernels import MOST_DRAWN
from trtforge.runtime.scheduling.random_numbers import random_bits
from trtforge.runtime.scheduling.sequence import Sequence


@dataclass(slots=True)  # made for every token, as `Output` is
class Row:
    """Tokens [start, start + count) of a sequence; `samples`: the next token is sampled after the last one.

    `scores`: the logits of all its tokens are wanted, for the log probabilities of the prompt.
    `drafts`: proposed tokens to compute after the last one, each with its logits, if the row samples.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    scores: bool = False
    drafts: tuple[int, ...] = ()

    @property
    def wanted(self) -> int:
        """Number of the row's last tokens, drafts included, whose logits are needed."""
        return self.count if self.scores else int(self.samples) + len(self.drafts)


def packing_order(row: Row) -> tuple[bool, bool, int]:
    """Sorts the rows of a step: those of one token first, of these those with logits, then by position."""
    return row.count > 1, not (row.samples or row.scores or row.drafts), row.start


def context_tokens(rows: Rows[Row]) -> int:
    """Tokens of the rows that compute several: chunks of contexts."""
    return sum(row.count for row in rows if row.count > 1)


def screening_of(rows: Rows[Row]) -> tuple[int, npt.NDArray[np.int64]]:
    """`candidates` and `draws` of the step that computes the rows."""
    wanted = [row for row in rows if row.wanted]
    each = [0 if row.scores else row.sequence.candidates for row in wanted]
    most, none = max(each, default=0) if all(each) else 0, np.zeros(0, dtype=np.int64)
    params = [row.sequence.request.sampling for row in wanted]
    if not most or not any(each.draws_from_all or each.draws_near for each in params):
        return most, none
    if len(wanted) > MOST_DRAWN or any(row.drafts for row in wanted):
        return 0, none
    keys = random_bits([row.sequence.draws_at for row in wanted])
    temperatures = np.array([(p.temperature or 1.0) if p.draws_from_all else 0.0 for p in params])
    distances = np.array([-math.log(p.min_p) * (p.temperature or 1.0) if p.draws_near else 0.0 for p in params])
    return most, np.stack([each.view(np.int64) for each in (keys, temperatures, distances)], axis=1).reshape(-1)


def sampling_rows(rows: Rows[Row]) -> list[tuple[Row, int]]:
    """The rows of a step that sample, each with the index of the logits after its last token that is no draft.

    Without those whose sequences have ended: a deferred token may end a sequence after its next row was scheduled.
    """
    ends = accumulate(row.wanted for row in rows)
    return [
        (row, end - 1 - len(row.drafts))
        for row, end in zip(rows, ends, strict=True)
        if row.samples and row.sequence.finish_reason is None
    ]
