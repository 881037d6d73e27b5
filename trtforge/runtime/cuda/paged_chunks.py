"""The chunks of sequences in a step, in the layout that the kernel in `chunk_kernels` reads."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trtforge.runtime.cuda.pinned import sent
from trtforge.runtime.scheduling.integers import Ints


class PagedChunks:
    """Chunks of sequences: each chunk's first token in the step, its position, its number of tokens, and its blocks.

    `tables` int64 (sequences, columns): block numbers of all tokens up to the chunk's end. `given`: rows and tables
    that are already on the device, possibly with fewer tokens than `rows`. Other tensors are copied to the device on
    first use and cached.

    `most_tokens`: of any chunk. `longest`: most tokens of a sequence up to the end of its chunk. `whole`: whether every
    chunk starts at the beginning of its sequence. `padded`: whether padding tokens may follow the chunks' tokens.
    """

    def __init__(
        self,
        rows: tuple[Ints, Ints, Ints],
        tables: Ints,
        block_size: int,
        device: torch.device,
        given: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.block_size = block_size
        self._rows = np.stack(rows, axis=1)
        self._tables = tables
        self._device = device
        self._given = given
        self._tiles: dict[int, Tensor] = {}
        _, starts, counts = rows
        self.most_tokens = int(counts.max())
        self.longest = int((starts + counts).max())
        self.whole = not starts.any()
        self.padded = given is not None

    @cached_property
    def rows(self) -> Tensor:
        """int64 (sequences, 3) on the device: first token, position, and number of tokens."""
        return sent(self._rows, self._device) if self._given is None else self._given[0]

    @cached_property
    def tables(self) -> Tensor:
        """int64 (sequences, columns) on the device."""
        return sent(np.ascontiguousarray(self._tables), self._device) if self._given is None else self._given[1]

    def tiles(self, queries: int) -> Tensor:
        """int64 (tiles, 2) on the device: sequence and first token of each tile of `queries` queries.

        Tiles with the longest context come first, so that no long one is left to run alone at the end.
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
