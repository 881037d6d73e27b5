"""The chunks of sequences in a step, as the kernel of `context_kernels` takes them."""

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trtforge.runtime.cuda.pinned import sent

Ints = npt.NDArray[np.int64]


class PagedContexts:
    """Chunks of sequences. Of each, the first token in the step, its position, how many tokens there are, and blocks.

    `tables` int64 (sequences, columns): block numbers of all tokens until the end of a chunk; a tensor is on the device
    already. All else is sent there when it is first asked for, and stays.
    """

    def __init__(
        self, firsts: Ints, starts: Ints, counts: Ints, tables: Ints | Tensor, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self._rows = np.stack([firsts, starts, counts], axis=1)
        self._tables = tables
        self._device = device
        self._tiles: dict[int, Tensor] = {}

    @property
    def most_tokens(self) -> int:
        """Of a chunk."""
        return int(self._rows[:, 2].max())

    @property
    def whole(self) -> bool:
        """Whether all of them begin their sequences."""
        return not self._rows[:, 1].any()

    @property
    def longest(self) -> int:
        """Tokens of a sequence until the end of its chunk."""
        return int(self._rows[:, 1:].sum(axis=1).max())

    @cached_property
    def rows(self) -> Tensor:
        """int64 (sequences, 3) on the device: first token, position, and number of tokens."""
        return sent(self._rows, self._device)

    @cached_property
    def tables(self) -> Tensor:
        """int64 (sequences, columns) on the device."""
        given = self._tables
        return given if isinstance(given, Tensor) else sent(np.ascontiguousarray(given), self._device)

    def tiles(self, queries: int) -> Tensor:
        """int64 (tiles, 2) on the device: sequence and first token of tiles of so many queries.

        Those that see the most tokens are the first ones, so that none of them is computed last and alone.
        """
        found = self._tiles.get(queries)
        if found is None:
            _, starts, counts = self._rows.T
            each = -(-counts // queries)
            sequences = np.repeat(np.arange(len(each)), each)
            places = (np.arange(len(sequences)) - np.repeat(each.cumsum() - each, each)) * queries
            order = np.argsort(-(starts[sequences] + places), kind="stable")
            found = self._tiles[queries] = sent(np.stack([sequences[order], places[order]], axis=1), self._device)
        return found
