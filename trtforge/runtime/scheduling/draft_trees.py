"""Trees of draft tokens: several tokens may follow one, and a step verifies all paths (Medusa, arXiv 2401.10774).

A tree is the index of each token's parent, -1 for the sequence's last token, in an order in which parents come first.
Its tokens are rows of the step. They take one KV cache slot each, in this order, behind the slots of the sequence, and
see only their own ancestors among them. A chain needs none of this: every token sees all before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from trtforge.core.features import MOST_NODES, Choices
from trtforge.runtime.scheduling.integers import Ints

TOLD = MOST_NODES + 1
"""Slots, the own one included, of which a token is told whether it sees them: by the bits of an integer."""
SEES_ALL = -1


@dataclass(frozen=True)
class TreeShape:
    """The nodes of a tree: the parent of each, the rank of its token among the candidates that follow the parent's, 0
    for the most likely one, and how many tokens lie above it."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]

    @classmethod
    def of(cls, choices: Choices) -> "TreeShape":
        """That of a recipe's `choices`, which are a tree: a path of most likely tokens becomes successive nodes."""
        paths = sorted(choices)
        places = {(): -1} | {path: index for index, path in enumerate(paths)}
        parents = tuple(places[path[:-1]] for path in paths)
        return cls(parents, tuple(path[-1] for path in paths), tuple(len(path) - 1 for path in paths))

    @classmethod
    def chain(cls, length: int) -> "TreeShape":
        """That of the most likely tokens, each after the one before."""
        return cls(tuple(range(-1, length - 1)), (0,) * length, tuple(range(length)))

    def within(self, depth: int) -> "TreeShape":
        """That of the nodes on paths of at most `depth` tokens."""
        if len(self.parents) <= depth:
            return self
        kept, parents = within(self.parents, depth)
        ranks, depths = (tuple(values[node] for node in kept) for values in (self.ranks, self.depths))
        return TreeShape(parents, ranks, depths)

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def most(self, depth: int) -> int:
        """How many candidates for tokens of this depth it takes at most."""
        return 1 + max(rank for rank, own in zip(self.ranks, self.depths, strict=True) if own == depth)

    @property
    def followed(self) -> tuple[int, ...]:
        """The nodes that have others below them."""
        return tuple(sorted(set(self.parents) - {-1}))


def path_to(parents: Sequence[int], index: int) -> list[int]:
    """The tokens of the path that ends with this one, which -1 is not; () are the parents of a chain."""
    if not parents:
        return list(range(index + 1))
    found = []
    while index >= 0:
        found.append(index)
        index = parents[index]
    return found[::-1]


def within(parents: tuple[int, ...], depth: int) -> tuple[list[int], tuple[int, ...]]:
    """The nodes of a tree on paths of at most `depth` tokens, and their parents among each other."""
    lengths: list[int] = []  # of the path to each node
    for parent in parents:
        lengths.append(1 + (lengths[parent] if parent >= 0 else 0))
    kept = [node for node, length in enumerate(lengths) if length <= depth]
    places = {-1: -1} | {node: place for place, node in enumerate(kept)}
    return kept, tuple(places[parents[node]] for node in kept)


def seen_slots(parents: Sequence[int]) -> list[int]:
    """For each token of a tree 64 bits, as signed integers: bit 63 - k says whether it sees the slot k before its own.

    SEES_ALL: it sees all slots, those beyond the 64 included, which all tokens see.
    """
    return list(_seen_slots(tuple(parents)))


@lru_cache(maxsize=1024)
def _seen_slots(parents: tuple[int, ...]) -> tuple[int, ...]:
    above: list[int] = []  # of each token, bit i for the i-th slot from that of the sequence's last token on
    found = []
    for index, parent in enumerate(parents):
        above.append((above[parent] if parent >= 0 else 1) | 1 << index + 1)
        shift = TOLD - 1 - (index + 1)
        bits = above[-1] << shift | (1 << shift) - 1
        found.append(bits - (bits >> TOLD - 1 << TOLD))
    return tuple(found)


def places_of(slots: Ints, rows: Ints, seen: Ints) -> Ints:
    """The positions of tokens in their sequences, given their places among the slots of these, the row of each, and
    what rows see, () for all.

    A slot that a token does not see holds another token for the same place as one of its ancestors.
    """
    if not len(seen):
        return slots
    bits = np.unpackbits(np.ascontiguousarray(seen).view(np.uint8).reshape(-1, 8), axis=1)
    hidden = TOLD - bits.sum(axis=1, dtype=np.int64)
    places: Ints = slots - hidden[rows]
    return places
