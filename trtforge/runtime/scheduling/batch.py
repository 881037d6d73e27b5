"""One step of the engine as integers: packed tokens, where each row stands and which KV blocks it holds.

`Step` is what rank 0 decides and every rank is told, as one int64 array; positions, slots and masks follow from it.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trtforge.runtime.scheduling.scheduler import Row

Ints = npt.NDArray[np.int64]
HEADER = 5
_SPLIT_FROM = 48  # padded blocks that are worth a second attention call in every layer


@dataclass(frozen=True)
class Step:
    """Rows of one token come first, shortest context first. Row i computes `counts[i]` tokens from `starts[i]` on.

    `wanted[i]` of its last positions give logits; `tables[i]` are its blocks, zero-padded to equal length. `length`:
    of the sequence that all rows are part of where that is known beforehand, else 0; some rotaries depend on it.
    """

    starts: Ints
    counts: Ints
    wanted: Ints
    tables: Ints
    tokens: Ints
    length: int = 0

    @classmethod
    def of_rows(cls, rows: Rows[Row]) -> "Step":
        """The step that computes what the scheduler chose, in its order."""
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.count for row in rows], dtype=np.int64)
        wanted = np.array([row.samples for row in rows], dtype=np.int64)
        tables = np.zeros((len(rows), max(len(row.sequence.table.blocks) for row in rows)), dtype=np.int64)
        tokens: list[int] = []
        for index, row in enumerate(rows):
            blocks = row.sequence.table.blocks
            tables[index, : len(blocks)] = blocks
            if row.count == 1:
                tokens.append(row.sequence.tokens[row.start])
            else:
                tokens.extend(row.sequence.tokens[row.start : row.start + row.count])
        return cls(starts, counts, wanted, tables, np.array(tokens, dtype=np.int64))

    def encode(self) -> Ints:
        """The step as one array: its own length, rows, table columns, tokens, `length`, then the fields."""
        rows, columns = self.tables.shape
        own = HEADER + 3 * rows + rows * columns + len(self.tokens)
        header = np.array([own, rows, columns, len(self.tokens), self.length], dtype=np.int64)
        return np.concatenate([header, self.starts, self.counts, self.wanted, self.tables.reshape(-1), self.tokens])

    @classmethod
    def decode(cls, values: Ints) -> "Step":
        """The inverse of `encode`; `values` may be longer than the step."""
        _, rows, columns, tokens, length = (int(value) for value in values[:HEADER])
        ends = np.cumsum([HEADER, rows, rows, rows, rows * columns, tokens])
        starts, counts, wanted, tables, packed = (values[a:b] for a, b in pairwise(ends))
        return cls(starts, counts, wanted, tables.reshape(rows, columns), packed, length)

    @property
    def generation_rows(self) -> int:
        """Rows of one token."""
        return int((self.counts == 1).sum())

    def positions(self) -> tuple[Ints, Ints]:
        """For every packed token its row and its position in that row's sequence."""
        rows = np.repeat(np.arange(len(self.counts)), self.counts)
        firsts = np.cumsum(self.counts) - self.counts
        return rows, np.arange(len(self.tokens)) - firsts[rows] + self.starts[rows]

    def slots(self, rows: Ints, positions: Ints, tokens_per_block: int) -> Ints:
        """For every packed token (its row and position) the slot of the cache that its keys and values go to."""
        columns, offsets = np.divmod(positions, tokens_per_block)
        slots: Ints = self.tables[rows, columns] * tokens_per_block + offsets
        return slots

    def logit_rows(self) -> Ints:
        """The packed tokens whose logits are wanted."""
        if np.array_equal(self.wanted, self.counts):
            return np.arange(len(self.tokens))
        before_end = np.repeat(np.cumsum(self.counts), self.counts) - np.arange(len(self.tokens))
        return np.flatnonzero(before_end <= np.repeat(self.wanted, self.counts))


def padded_rows(rows: int) -> int:
    """A row count of a short list that is at least `rows`: 1, 2, 4, 8, multiples of 16 to 128, of 64 to 512, of 256.

    oneDNN compiles a kernel for every shape that it meets, which takes as long as a step.
    """
    if rows <= 8:
        return 1 << (rows - 1).bit_length() if rows else 0
    unit = 16 if rows <= 128 else 64 if rows <= 512 else 256
    return -(-rows // unit) * unit


def buckets(blocks: Ints, first: int = 0) -> list[tuple[int, int]]:
    """Ranges of rows (their block counts ascending) that are computed together, so that padding stays small.

    The rows are cut where that saves most padded blocks, as long as it saves more than another call costs.
    """
    end = first + len(blocks)
    if len(blocks) < 2:
        return [(first, end)] if len(blocks) else []
    saved = np.arange(1, len(blocks)) * (blocks[-1] - blocks[:-1])
    cut = int(saved.argmax()) + 1
    if saved[cut - 1] < _SPLIT_FROM:
        return [(first, end)]
    return [*buckets(blocks[:cut], first), *buckets(blocks[cut:], first + cut)]
