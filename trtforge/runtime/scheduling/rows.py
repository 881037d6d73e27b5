"""The part of one sequence that a step computes."""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from trtforge.models.kernels import MOST_DRAWN
from trtforge.runtime.scheduling.draft_trees import SEES_ALL, path_to, seen_slots
from trtforge.runtime.scheduling.integers import Ints
from trtforge.runtime.scheduling.random_numbers import random_bits
from trtforge.runtime.scheduling.sequence import Sequence

_NONE: Ints = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)  # made for every token, as `Output` is
class Row:
    """Tokens [start, start + count) of a sequence; `samples`: the next token is sampled after the last one.

    `scores`: the logits of all its tokens are wanted, for the log probabilities of the prompt.
    `drafts`: draft tokens to compute, with their logits, after the last token, if the row samples; `parents`: of a
    tree of drafts, see `draft_trees`; `at`: index of the last accepted draft, -1 before.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    scores: bool = False
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    at: int = -1

    @property
    def wanted(self) -> int:
        """Number of the row's last tokens, drafts included, whose logits are needed."""
        return self.count if self.scores else int(self.samples) + len(self.drafts)

    @property
    def path(self) -> list[int]:
        """Indices of the accepted draft tokens."""
        return path_to(self.parents, self.at)

    @property
    def next_length(self) -> int:
        """Length of the sequence after the accepted drafts and one sampled token."""
        return self.start + self.count + len(self.path) + 1

    def accept(self, token: int) -> bool:
        """Accept the draft that follows the last accepted one and equals `token`; False if there is none."""
        if not self.drafts:
            return False
        if not self.parents:
            followers: Iterable[int] = range(self.at + 1, min(self.at + 2, len(self.drafts)))
        else:
            followers = (index for index, parent in enumerate(self.parents) if parent == self.at)
        found = next((index for index in followers if self.drafts[index] == token), None)
        if found is None:
            return False
        self.at = found
        return True


def packing_order(row: Row) -> tuple[bool, bool, int]:
    """Sort key of a step's rows: single-token rows with logits, those without, then chunks; each by position."""
    return row.count > 1, not (row.samples or row.scores or row.drafts), row.start


def drafted_rows(rows: Rows[Row], starts: Ints, counts: Ints) -> tuple[Ints, Ints, Ints]:
    """For rows that compute `counts` tokens from `starts` on: the number of step rows that each becomes with its
    drafts, the starts of those rows, and the number of drafts that belong to a chunk's row."""
    drafts, chunks = np.array([len(row.drafts) for row in rows], dtype=np.int64), counts > 1
    each = 1 + drafts * ~chunks
    starts = np.arange(each.sum()) - np.repeat(each.cumsum() - each - starts, each)
    return each, starts, drafts * chunks


def seen_by(rows: Rows[Row]) -> Ints:
    """`Step.seen` for these rows."""
    if not any(row.parents for row in rows):
        return _NONE
    found: list[int] = []
    for row in rows:
        alone = row.count > 1 or not row.drafts
        found.append(SEES_ALL)
        found += [] if alone else seen_slots(row.parents) if row.parents else [SEES_ALL] * len(row.drafts)
    return np.array(found, dtype=np.int64)


def moves_of(accepted: Iterable[Row], depth: int, size: int) -> Ints:
    """Slots to move for the drafts that rows accepted last, after `depth` others: pairs (from, to), int64 (2 x moves,).
    `size`: tokens per block."""
    pairs: list[int] = []
    for row in accepted:
        if row.at != depth:
            blocks, first = row.sequence.table.blocks, row.start + row.count
            for position in (first + row.at, first + depth):
                pairs.append(blocks[position // size] * size + position % size)
    return np.array(pairs, dtype=np.int64) if pairs else _NONE


def context_tokens(rows: Rows[Row]) -> int:
    """Number of tokens in context chunks: rows that compute several tokens."""
    return sum(row.count for row in rows if row.count > 1)


def screening_of(rows: Rows[Row]) -> tuple[int, Ints]:
    """`Step.candidates` and `Step.draws` for these rows."""
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
    """The rows of a step that sample, each with the index of the logits after its last token before the drafts.

    Rows of ended sequences are left out: a deferred token may end a sequence after its next row was scheduled.
    """
    ends = accumulate(row.wanted for row in rows)
    return [
        (row, end - 1 - len(row.drafts))
        for row, end in zip(rows, ends, strict=True)
        if row.samples and row.sequence.finish_reason is None
    ]
