"""The part of one sequence that a step computes."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate

from trtforge.runtime.scheduling.sequence import Sequence


@dataclass(slots=True)  # made for every token, as `Output` is
class Row:
    """Tokens [start, start + count) of a sequence; `samples`: the next token is sampled after the last one.

    `scores`: the logits of all its tokens are wanted, for the log probabilities of the prompt.
    `drafts`: proposed tokens to compute after the last one, each with its logits.
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


def candidates_of(rows: Rows[Row]) -> int:
    """Of how many of the most likely tokens the logits must be right, in every row that has logits; 0 for all."""
    most = 0
    for row in rows:
        if row.wanted:
            if row.scores or not row.sequence.candidates:
                return 0
            most = max(most, row.sequence.candidates)
    return most


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
