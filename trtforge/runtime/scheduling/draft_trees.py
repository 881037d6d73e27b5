"""Trees of draft tokens: several tokens may follow one, and a step verifies all paths (Medusa, arXiv 2401.10774).

A tree is a list of parents: the index of each token's parent, -1 for the sequence's last token; parents come first.
Its tokens are rows of the step. Each takes one KV cache slot, in this order, after the sequence's slots, and sees only
its own ancestors among them. A chain needs none of this: every token sees all tokens before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from trtforge.core.features import MOST_NODES, Choices
from trtforge.runtime.scheduling.integers import Ints

TOLD = MOST_NODES + 1
"""Number of slots, its own included, whose visibility to a token is encoded in the bits of an integer."""
SEES_ALL = -1


@dataclass(frozen=True)
class TreeShape:
    """The nodes of a tree: each node's parent, the rank of its token among the candidates after the parent (0 for the
    most likely), and its depth (number of nodes above it)."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]

    @classmethod
    def of(cls, choices: Choices) -> "TreeShape":
        """The tree of a recipe's `choices`. A path of most likely tokens becomes consecutive nodes."""
        paths = sorted(choices)
        places = {(): -1} | {path: index for index, path in enumerate(paths)}
        parents = tuple(places[path[:-1]] for path in paths)
        return cls(parents, tuple(path[-1] for path in paths), tuple(len(path) - 1 for path in paths))

    @classmethod
    def chain(cls, length: int) -> "TreeShape":
        """A chain of most likely tokens."""
        return cls(tuple(range(-1, length - 1)), (0,) * length, tuple(range(length)))

    def within(self, depth: int) -> "TreeShape":
        """The part of the tree on paths of at most `depth` tokens."""
        if len(self.parents) <= depth:
            return self
        kept, parents = within(self.parents, depth)
        ranks, depths = (tuple(values[node] for node in kept) for values in (self.ranks, self.depths))
        return TreeShape(parents, ranks, depths)

    @property
    def is_chain(self) -> bool:
        """Whether each node's parent is the node before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def most(self, depth: int) -> int:
        """Number of most likely candidates that it needs for tokens of this depth."""
        return 1 + max(rank for rank, own in zip(self.ranks, self.depths, strict=True) if own == depth)

    @property
    def followed(self) -> tuple[int, ...]:
        """The nodes that have children."""
        return tuple(sorted(set(self.parents) - {-1}))


def path_to(parents: Sequence[int], index: int) -> list[int]:
    """Indices of the tokens on the path to token `index`; empty for -1. `parents`: () for a chain."""
    if not parents:
        return list(range(index + 1))
    found = []
    while index >= 0:
        found.append(index)
        index = parents[index]
    return found[::-1]


def within(parents: tuple[int, ...], depth: int) -> tuple[list[int], tuple[int, ...]]:
    """The nodes of a tree on paths of at most `depth` tokens, and their parents, renumbered."""
    lengths: list[int] = []  # of the path to each node
    for parent in parents:
        lengths.append(1 + (lengths[parent] if parent >= 0 else 0))
    kept = [node for node, length in enumerate(lengths) if length <= depth]
    places = {-1: -1} | {node: place for place, node in enumerate(kept)}
    return kept, tuple(places[parents[node]] for node in kept)


def seen_slots(parents: Sequence[int]) -> list[int]:
    """A signed 64-bit integer for each token of a tree: bit 63 - k is set if it sees the slot k before its own.

    Slots further back are visible to all tokens. SEES_ALL: the token sees all slots.
    """
    return list(_seen_slots(tuple(parents)))


@lru_cache(maxsize=1024)
def _seen_slots(parents: tuple[int, ...]) -> tuple[int, ...]:
    above: list[int] = []  # for each token, bit i for the i-th slot, counted from the sequence's last token
    found = []
    for index, parent in enumerate(parents):
        above.append((above[parent] if parent >= 0 else 1) | 1 << index + 1)
        shift = TOLD - 1 - (index + 1)
        bits = above[-1] << shift | (1 << shift) - 1
        found.append(bits - (bits >> TOLD - 1 << TOLD))
    return tuple(found)


def places_of(slots: Ints, rows: Ints, seen: Ints) -> Ints:
    """The positions of tokens in their sequences, given their slots, the row of each token, and `seen` of the rows (()
    if they see all).

    A slot that a token does not see contains an alternative to one of its ancestors, at the same position.
    """
    if not len(seen):
        return slots
    bits = np.unpackbits(np.ascontiguousarray(seen).view(np.uint8).reshape(-1, 8), axis=1)
    hidden = TOLD - bits.sum(axis=1, dtype=np.int64)
    places: Ints = slots - hidden[rows]
    return places
