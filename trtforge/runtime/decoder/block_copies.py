"""Copies of whole KV blocks before a step: on the device, and to and from host memory."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trtforge.core.errors import ForgeError, first_line
from trtforge.runtime.cuda.pinned import pin, sent
from trtforge.runtime.decoder.kv_cache import zeros
from trtforge.runtime.scheduling.integers import Ints


class BlockCopies:
    """Copies blocks of a rank's layers, on the device and in host memory, which this class allocates.

    With a GPU, host memory is pinned, so that copies are queued on the stream of the kernels.
    """

    def __init__(self, layers: Sequence[Tensor], first: int, count: int) -> None:
        """`layers`: the caches (blocks, ...); empty if the rank has no such layers. The `count` blocks in host memory
        are numbered from `first` on."""
        self._first = first
        self._layers = [(layer, _host_memory(layer, count)) for layer in layers]

    def copy(self, pairs: Ints) -> None:
        """Copy blocks, int64 (pairs x 2): from, to, from, to. All are read before any is written."""
        if not self._layers:
            return
        device = self._layers[0][0].device
        sources, targets = (_Places(blocks, self._first, device) for blocks in pairs.reshape(-1, 2).T)
        for layer, host in self._layers:
            content = layer.new_empty((len(pairs) // 2, *layer.shape[1:]))
            content.index_copy_(0, sources.rows, layer.index_select(0, sources.blocks))
            for row, block, count in sources.in_host:
                content[row : row + count].copy_(host[block : block + count], non_blocking=True)
            layer.index_copy_(0, targets.blocks, content.index_select(0, targets.rows))
            for row, block, count in targets.in_host:
                host[block : block + count].copy_(content[row : row + count], non_blocking=True)


class _Places:
    """The sources or the targets of the pairs. `rows`: the pairs whose block is on the device; `blocks`: these blocks.

    `in_host`: the others, as first row, first block and length of each run of consecutive rows and blocks.
    """

    def __init__(self, blocks: Ints, first: int, device: torch.device) -> None:
        inside = blocks < first
        self.rows = sent(inside.nonzero()[0], device)
        self.blocks = sent(blocks[inside], device)
        rows = (~inside).nonzero()[0]
        each = np.stack((rows, blocks[rows] - first), axis=1)
        begins = np.flatnonzero((np.diff(each, axis=0, prepend=each[:1]) != 1).any(axis=1))
        ends = np.append(begins[1:], len(each))
        self.in_host = [(*each[begin].tolist(), int(end - begin)) for begin, end in zip(begins, ends, strict=False)]


def _host_memory(layer: Tensor, count: int) -> Tensor:
    memory = zeros((count, *layer.shape[1:]), layer.dtype, torch.device("cpu"))
    if layer.is_cuda and memory.nbytes:
        try:
            pin(memory)
        except RuntimeError as error:
            raise ForgeError(
                f"the driver cannot pin {memory.nbytes:,} bytes of host memory for KV blocks: {first_line(error)}",
                hint="Lower kv_cache_host_memory_bytes, or raise the limit of locked memory (`ulimit -l`).",
            ) from error
    return memory
