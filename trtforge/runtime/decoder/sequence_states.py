"""The states that a linear attention layer keeps for sequences between steps.

A state is identified by its sequence's first KV block and a position, and summarises the tokens before that position.
Sequences of models with linear attention never share blocks, and each begins at position 0, also after a pause. The
states after every row of a step are kept, so that rejected drafts can be undone. The layer is not told when a sequence
ends: its state stays until its block is taken again. Recently freed blocks are taken first, so there are about as many
states as sequences that ran at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from trtforge.runtime.scheduling.batch import Step


@dataclass(frozen=True)
class State:
    """`inputs` (kernel - 1, channels): the last inputs of the convolution. `memory` (heads, key size, value size).

    The next step of the sequence may overwrite `memory`, except that of the empty state, which sequences share.
    """

    inputs: Tensor
    memory: Tensor


@dataclass(frozen=True)
class Span:
    """Packed tokens [first, end) of a sequence. `block`: its first KV block; `start`: the first token's position."""

    first: int
    end: int
    block: int
    start: int

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Spans:
    """The rows of a step. A sequence with drafts has several rows, which are in successive waves.

    `taken`: the sequences' blocks except their first ones.
    """

    waves: tuple[tuple[Span, ...], ...]
    taken: frozenset[int]

    @classmethod
    def of(cls, step: Step) -> "Spans":
        """The rows of a step."""
        waves: list[list[Span]] = []
        depths: dict[int, int] = {}
        for span in _rows(step):
            depth = depths.get(span.block, -1) + 1
            depths[span.block] = depth
            if depth == len(waves):
                waves.append([])
            waves[depth].append(span)
        taken = frozenset(step.tables[:, 1:].reshape(-1).tolist()) - {0}  # tables are padded with zeros
        return cls(tuple(map(tuple, waves)), taken)


class SequenceStates:
    """The states of one layer. `empty`: the state of a sequence without tokens."""

    def __init__(self, empty: State) -> None:
        self._empty = empty
        self._kept: dict[int, dict[int, State]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def before(self, span: Span) -> State:
        """The state before the first token of a row."""
        if span.start == 0:
            return self._empty
        found = self._kept.get(span.block, {}).get(span.start)
        assert found is not None, f"no state of block {span.block} at position {span.start}"
        return found

    def keep(self, span: Span, state: State, *, more: bool) -> None:
        """Keep the state after a row. `more`: keep those of earlier rows of the sequence in this step, too."""
        if not more:
            self._kept[span.block] = {}
        self._kept[span.block][span.start + len(span)] = state

    def forget(self, taken: frozenset[int]) -> None:
        """Drop the states of sequences that have ended: other sequences have taken these blocks."""
        for block in taken & self._kept.keys():
            del self._kept[block]


def _rows(step: Step) -> Iterator[Span]:
    first = 0
    for block, start, count in zip(step.tables[:, 0].tolist(), step.starts.tolist(), step.counts.tolist(), strict=True):
        yield Span(first, first + count, block, start)
        first += count
