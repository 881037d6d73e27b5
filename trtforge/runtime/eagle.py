"""An EAGLE network as a drafter: which positions it computes, and when.

Its keys and values are an additional layer in the blocks of the engine's KV cache, so prefixes, copies, pauses and
stored blocks work as usual. Position p needs token p + 1: prompt positions are written right after a step; a sequence's
last position, and those of its drafts, must wait until the tokens are sampled. A shared block's last position may come
from another sequence with a different next token, and later positions from a chain of drafts. That can make a draft
worse, but never changes an output.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trtforge.runtime.decoder.eagle import Network
from trtforge.runtime.scheduling.draft_trees import TreeShape
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.sequence import Draft, Sequence
from trtforge.runtime.scheduling.virtual_tokens import VIRTUAL


class EagleRanks(Protocol):
    """Ranks; the first one has the EAGLE network."""

    num_blocks: int

    @property
    def network(self) -> Network:
        """The network, with its cache."""

    def hidden_states(self) -> Tensor:
        """(tokens, width) for all tokens of the last step; valid until the next step."""


@dataclass(slots=True)
class _Positions:
    """Positions to write, with `indices` of their hidden states, their next tokens, and their slots."""

    indices: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(self, sequence: Sequence, start: int, count: int, index: int, size: int) -> None:
        """Add `count` positions of a sequence from `start` on; `index`: of the first position's hidden state."""
        blocks, positions = sequence.table.blocks, range(start, start + count)
        self.indices.extend(range(index, index + count))
        tokens = sequence.tokens[start + 1 : start + 1 + count]
        if sequence.virtual is not None:  # of prompt table rows, the network sees only the hidden states
            tokens = [token if token < VIRTUAL else 0 for token in tokens]
        self.tokens.extend(tokens)
        self.positions.extend(positions)
        self.slots.extend(blocks[position // size] * size + position % size for position in positions)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Hidden states (positions, hidden) from position `first` on, as the network reads them.

    `row`: the row whose last token and drafts they belong to, until it is known which drafts are accepted.
    """

    first: int
    states: Tensor
    row: Row | None = None

    def chosen(self) -> "_Waiting":
        """Only the states of the last token and the accepted drafts of a tree."""
        if self.row is None or not self.row.parents:
            return self
        return _Waiting(self.first, self.states[[0, *(1 + node for node in self.row.path)]])


class EagleDrafter:
    """Proposes a chain of the network's most likely tokens, or a tree of likely ones."""

    worker_pids: tuple[int, ...] = ()

    def __init__(self, ranks: EagleRanks, shape: TreeShape, tokens_per_block: int, most: int | None = None) -> None:
        """`shape`: of the drafts; `most`: maximum number of sequences, above which nothing is drafted."""
        self._ranks, self._network = ranks, ranks.network
        self._shape, self._size, self._most = shape, tokens_per_block, most
        self._waiting: dict[Sequence, _Waiting] = {}

    def draft(self, sequences: list[Sequence]) -> None:
        """See Drafter. A sequence whose last hidden state is not known gets no draft."""
        ready: list[tuple[Sequence, int]] = []
        found: list[Tensor] = []
        late, offset = _Positions(), 0
        too_many = self._most is not None and len(sequences) > self._most
        for sequence in sequences:
            sequence.draft = Draft()
            waiting, last = self._waiting.get(sequence), len(sequence.tokens) - 2
            waiting = None if waiting is None else waiting.chosen()
            if waiting is None or not 0 <= last - waiting.first < len(waiting.states):
                continue
            index = last - waiting.first
            late.add(sequence, waiting.first, index + too_many, offset, self._size)
            found.append(waiting.states[: index + 1])
            offset += index + 1
            self._waiting[sequence] = _Waiting(last, waiting.states[index:])
            ready.append((sequence, offset - 1))
        if not found:
            return
        states = torch.cat(found)
        self._write(late, states)
        if not too_many:
            self._tree([each for each in ready if each[0].room > 0], states)

    def observe(self, rows: list[Row], logits: Tensor | None) -> None:
        """See Drafter."""
        states = self._network.joined(self._ranks.hidden_states())
        known, end = _Positions(), 0
        for row in rows:
            sequence, begin = row.sequence, end
            end += row.count + len(row.drafts)
            count = min(row.count, len(sequence.tokens) - 1 - row.start)
            known.add(sequence, row.start, count, begin, self._size)
            if row.samples and sequence.group is None:
                last = begin + row.count - 1
                self._waiting[sequence] = _Waiting(row.start + row.count - 1, states[last:end].clone(), row)
        self._write(known, states)

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._waiting.pop(sequence, None)

    def close(self) -> None:
        """See Drafter."""

    def _write(self, found: _Positions, states: Tensor) -> None:
        if not found.positions:
            return
        chosen = states
        if found.indices != list(range(len(states))):
            chosen = states.index_select(0, torch.tensor(found.indices, device=states.device))
        tokens, positions, slots = map(np.array, (found.tokens, found.positions, found.slots))
        self._network.write(tokens, chosen, positions, slots)

    def _tree(self, ready: list[tuple[Sequence, int]], states: Tensor) -> None:
        if not ready:
            return
        ready.sort(key=lambda each: len(each[0].tokens))
        sequences = [sequence for sequence, _ in ready]
        shape = self._shape.within(max(sequence.room for sequence in sequences))
        positions = np.array([len(sequence.tokens) - 2 for sequence in sequences])
        columns = (positions + len(shape.followed)) // self._size + 1
        tables = np.zeros((len(sequences), int(columns.max())), dtype=np.int64)
        spare = self._ranks.num_blocks
        for row, sequence in enumerate(sequences):
            own = sequence.table.blocks[: int(columns[row])]
            more = int(columns[row]) - len(own)
            tables[row, : len(own) + more] = [*own, *range(spare, spare + more)]
            spare += more
        indices = torch.tensor([index for _, index in ready], device=states.device)
        tokens = np.array([sequence.tokens[-1] for sequence in sequences])
        chosen = self._network.tree(tokens, states.index_select(0, indices), positions, tables, shape).tolist()
        for sequence, drafts in zip(sequences, chosen, strict=True):
            draft = Draft(tuple(drafts), parents=() if shape.is_chain else shape.parents)
            sequence.draft = draft.within(sequence.room)
