"""The paged KV cache of a layer: what steps write to slots, and gather by blocks.

A layer's cache is one tensor (blocks, tokens_per_block, vectors, size): keys before values, so that a step writes and
gathers both at once, or a single latent vector that is both.
"""

import torch
from torch import Tensor

from trtforge.models.transforms import quantize_fp8
from trtforge.runtime.float8 import from_e4m3


class Scratch:
    """Memory for gathered blocks, one for all layers: it stays in the processor's cache and is never given back."""

    def __init__(self) -> None:
        self._blocks: Tensor | None = None

    def gather(self, storage: Tensor, blocks: Tensor) -> Tensor:
        """storage[blocks]; valid until the next call."""
        if storage.is_cuda:
            return storage.index_select(0, blocks)
        if self._blocks is None or len(self._blocks) < len(blocks):
            self._blocks = storage.new_empty((len(blocks) * 5 // 4 + 1, *storage.shape[1:]))
        into = self._blocks[: len(blocks)]
        return torch.index_select(storage, 0, blocks, out=into)


class LayerCache:
    """Vectors of one layer. With `scale`, they are stored as E4M3 of value / scale."""

    def __init__(self, storage: Tensor, scale: float | None, dtype: torch.dtype, scratch: Scratch) -> None:
        self._blocks = storage
        self._scratch = scratch
        self._slots = storage.view(-1, *storage.shape[2:])
        self._scale = scale
        self._dtype = dtype
        self.exact = scale is None

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Store (tokens, vectors, size)."""
        if self._scale is not None:
            values = quantize_fp8(values, self._scale).view(torch.uint8)
        self._slots.index_copy_(0, slots, values)

    def read(self, blocks: Tensor) -> Tensor:
        """(tokens, vectors, size) of these blocks, in the compute type; valid until the next read."""
        values = self._scratch.gather(self._blocks, blocks).view(-1, *self._slots.shape[1:])
        if self._scale is not None:
            return from_e4m3(values.view(torch.float8_e4m3fn), self._dtype, self._scale)
        return values
