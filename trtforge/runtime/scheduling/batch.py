"""One step of the engine as integers: packed tokens, and the position and KV blocks of each row.

Rank 0 broadcasts each `Step` to all ranks as one int64 array (`step_codec.py`); positions, slots and masks are derived
from it.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

import numpy as np

from trtforge.runtime.scheduling.integers import Ints
from trtforge.runtime.scheduling.rows import Row, drafted_rows, screening_of, seen_by
from trtforge.runtime.scheduling.virtual_tokens import VIRTUAL, embedded
from trtforge.runtime.scheduling.window_blocks import WindowBlocks


@dataclass(frozen=True)
class Step:
    """Single-token rows come first. Row i computes `counts[i]` tokens from `starts[i]`.

    Logits are computed for its last `wanted[i]` tokens; `tables[i]` are its blocks, zero-padded to equal length.
    `length`: total length of the sequence that all rows belong to, 0 if unknown; some rotary scalings depend on it.
    `copies`: blocks to copy first, as pairs (from, to) one after another; all are read before any is written.
    `adapters`: the task id of each row's LoRA adapter, 0 without one; empty if no row has one.
    `window_tables`, `window_copies`: like `tables` and `copies`, for sliding-window layers with separate blocks.
    `candidates`: number of most likely tokens whose logits must be right in every row; 0 for all. `draws`: empty, or
    three numbers for each row with logits: the key of its noise, the bits of its temperature (0 if it does not draw
    from all tokens), and the bits of the maximum distance of a logit below the largest one (0: no limit).
    `embeddings`: rows of prompt tables in the compute type, as int64 (rows, words); token VIRTUAL + i is row i.
    `filled`: blocks to overwrite after the copies; `contents`: for all ranks' layers, as int64 (blocks, words).
    `seen`: `seen_slots` of each row; empty if all rows see all slots before theirs. If set, `starts` are slots.
    """

    starts: Ints
    counts: Ints
    wanted: Ints
    tables: Ints
    tokens: Ints
    length: int = 0
    copies: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    adapters: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    window_tables: Ints = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    window_copies: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    candidates: int = 0
    draws: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    embeddings: Ints = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    filled: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    contents: Ints = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    seen: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @classmethod
    def of_rows(
        cls, rows: Rows[Row], copies: Rows[tuple[int, int]] = (), windows: WindowBlocks | None = None
    ) -> "Step":
        """The step for the scheduler's rows, in order. Drafts become rows of one token, or belong to a chunk's row."""
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.count for row in rows], dtype=np.int64)
        wanted = np.array([row.count if row.scores else row.samples for row in rows], dtype=np.int64)
        adapted = any(row.sequence.adapter for row in rows)
        adapters = np.array([row.sequence.adapter for row in rows if adapted], dtype=np.int64)
        tables = np.zeros((len(rows), max(len(row.sequence.table.blocks) for row in rows)), dtype=np.int64)
        tokens: list[int] = []
        for index, row in enumerate(rows):
            blocks = row.sequence.table.blocks
            tables[index, : len(blocks)] = blocks
            if row.count == 1:
                tokens.append(row.sequence.tokens[row.start])
            else:
                tokens.extend(row.sequence.tokens[row.start : row.start + row.count])
            tokens.extend(row.drafts)
        if any(row.drafts for row in rows):
            each, starts, behind = drafted_rows(rows, starts, counts)
            counts, wanted = counts + behind, wanted + behind
            counts, wanted, tables = (np.repeat(values, each, axis=0) for values in (counts, wanted, tables))
            adapters = np.repeat(adapters, each) if adapted else adapters
        found = starts, counts, wanted, tables, np.array(tokens, dtype=np.int64)
        pairs = np.array(copies, dtype=np.int64).reshape(-1)
        candidates, draws = screening_of(rows)
        step = cls(*found, candidates=candidates, draws=draws, copies=pairs, adapters=adapters, seen=seen_by(rows))
        if found[-1].max() >= VIRTUAL:
            numbered, embeddings = embedded(step.tokens, (row.sequence.virtual for row in rows))
            step = replace(step, tokens=numbered, embeddings=embeddings)
        if windows is None:
            return step
        window_copies = np.array(windows.take_copies(), dtype=np.int64).reshape(-1)
        return replace(step, window_tables=windows.numbers[tables], window_copies=window_copies)

    @property
    def windowed(self) -> "Step | None":
        """The step as sliding-window layers see it; None if they have no separate blocks."""
        own = self.window_tables
        return replace(self, tables=own, window_tables=own[:0]) if len(own) else None

    @property
    def generation_rows(self) -> int:
        """Number of single-token rows."""
        return int((self.counts == 1).sum())

    def positions(self) -> tuple[Ints, Ints]:
        """The row of each packed token, and its position in that row's sequence."""
        if len(self.tokens) == len(self.counts):
            return np.arange(len(self.counts)), self.starts
        rows = np.repeat(np.arange(len(self.counts)), self.counts)
        firsts = np.cumsum(self.counts) - self.counts
        return rows, np.arange(len(self.tokens)) - firsts[rows] + self.starts[rows]

    def slots(self, rows: Ints, positions: Ints, tokens_per_block: int) -> Ints:
        """The KV cache slot of each packed token, given its row and position."""
        columns, offsets = np.divmod(positions, tokens_per_block)
        slots: Ints = self.tables[rows, columns] * tokens_per_block + offsets
        return slots

    def logit_rows(self) -> Ints:
        """Indices of the packed tokens whose logits are wanted."""
        if np.array_equal(self.wanted, self.counts):
            return np.arange(len(self.tokens))
        before_end = np.repeat(np.cumsum(self.counts), self.counts) - np.arange(len(self.tokens))
        return np.flatnonzero(before_end <= np.repeat(self.wanted, self.counts))
