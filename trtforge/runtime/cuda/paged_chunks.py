"""The chunks of sequences in a step, as the kernel of `chunk_kernels` takes them."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trtforge.runtime.cuda.pinned import sent
from trtforge.runtime.scheduling.integers import Ints


class PagedChunks:
    """Chunks of sequences. Of each, the first token in the step, its position, how many tokens there are, and blocks.

    `tables` int64 (sequences, columns): block numbers of all tokens until the end of a chunk. `given`: rows and tables
    on the device already, whose numbers of tokens may be smaller. All else is sent there when it is first asked for,
    and stays.

    `most_tokens`: of a chunk. `longest`: tokens of a sequence until the end of its chunk. `whole`: whether all chunks
    begin their sequences. `padded`: whether there may be tokens behind those of the chunks.
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
