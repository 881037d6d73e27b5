"""The paged KV cache of a layer: steps write to slots and gather blocks.

A layer's cache is one tensor (blocks, tokens_per_block, vectors, size): keys before values, so that a step writes and
gathers both at once, or a single latent vector that is both.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from trtforge.core.recipe import KvCacheFormat
from trtforge.models.transforms import quantize_fp8
from trtforge.runtime.architecture.rotary import Rotation
from trtforge.runtime.cuda.fused import FusedKernels, StepKernels, step_kernels_for
from trtforge.runtime.cuda.paged_attention import PagedAttention, Turning, paged_attention_for
from trtforge.runtime.cuda.paged_chunks import PagedChunks
from trtforge.runtime.linears.float8 import from_e4m3
from trtforge.runtime.linears.int8 import round_to_int8
from trtforge.runtime.native.bindings import PagedHeads, PagedRows, native_for
from trtforge.runtime.native.context import attend_context, attends_context
from trtforge.runtime.native.pages import own_pages


def storage_dtype(format_: KvCacheFormat, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a layer's cache tensor; `dtype` is the compute type."""
    return {"none": dtype, "fp8": torch.uint8, "int8": torch.int8}[format_]


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU, the operating system allocates each memory page at its first use."""
    if device.type != "cpu" or math.prod(shape) == 0:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return own_pages(shape, dtype)


class InPlace(Protocol):
    """Kernels that compute attention of single-token rows and read the cache in place."""

    def attends(self, size: int) -> bool:
        """Whether the kernels support heads of this size."""

    def attend(
        self, queries: Tensor, rows: PagedRows, storage: Tensor, cache_scale: float, how: PagedHeads, out: Tensor
    ) -> None:
        """Write the attention of queries (rows, heads or more, size) to `storage` into `out` (rows, heads x size)."""


def in_place_for(device: torch.device, dtype: torch.dtype) -> InPlace | None:
    """The kernels of this device, if there are any."""
    return native_for(device, dtype) or paged_attention_for(device)


class Scratch:
    """Buffer for gathered blocks, shared by all layers, so that it stays in the CPU's cache. Never freed."""

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
    """The KV cache of one layer. With `scale`, storage contains value / scale: uint8 storage as E4M3, int8 as INT8."""

    def __init__(self, storage: Tensor, scale: float | None, dtype: torch.dtype, scratch: Scratch) -> None:
        self._blocks = storage
        self._scratch = scratch
        self._slots = storage.flatten(0, 1)
        self._scale = scale
        self._factor = 1.0 if scale is None else scale
        self._dtype = dtype
        self._kernels = native_for(storage.device, dtype)
        self._writing = _writing_kernels(storage, dtype)
        self._in_place = in_place_for(storage.device, dtype)
        self.exact = scale is None

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Store (tokens, vectors, size)."""
        kernels = self._writing if values.stride(2) == 1 and values.stride(1) == values.shape[2] else None
        if kernels is not None and self._scale is None:
            kernels.write_slots(self._slots, slots, values)
        elif kernels is not None and self._scale is not None:
            kernels.quantize_slots(self._slots, slots, values, self._scale)
        else:
            self._slots.index_copy_(0, slots, self._quantized(values))

    def rotate_and_write(self, heads: Tensor, rotation: Rotation, slots: Tensor, *, queries: int, keys: int) -> bool:
        """Rotate queries and keys of (tokens, queries + vectors, size) in place, and store the vectors.

        False, with nothing done, if no kernel does both.
        """
        kernels = self._writing
        if not isinstance(kernels, FusedKernels) or heads.stride(2) != 1:
            return False
        kernels.rotate_and_write(
            heads,
            rotation.cos,
            rotation.sin,
            self._slots,
            slots,
            self._factor,
            queries=queries,
            keys=keys,
            interleaved=rotation.interleaved,
        )
        return True

    def _quantized(self, values: Tensor) -> Tensor:
        if self._scale is None:
            return values
        integers = self._blocks.dtype is torch.int8
        return round_to_int8(values, self._scale) if integers else _e4m3_bytes(values, self._scale)

    @property
    def storage(self) -> Tensor:
        """The cache tensor."""
        return self._blocks

    def fill(self, block: int, content: Tensor) -> None:
        """Overwrite a block with its bytes, uint8 (bytes of a block,)."""
        self._blocks[block].copy_(content.view(self._blocks.dtype).view(self._blocks.shape[1:]))

    @property
    def attends_to_codes(self) -> bool:
        """Whether `attend` takes a `code_scale`."""
        return isinstance(self._in_place, PagedAttention)

    @property
    def attends_to_turned(self) -> bool:
        """Whether `attend` takes a `rotation`."""
        return self.attends_to_codes and isinstance(self._writing, FusedKernels)

    def attend(
        self,
        queries: Tensor,
        rows: PagedRows,
        heads: PagedHeads,
        out: Tensor,
        code_scale: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        """Attention of single-token rows in place. `code_scale` (1,): `out` gets E4M3 codes of result / code_scale.

        `rotation`: of heads that are not yet rotated or written to the cache, see `PagedAttention.attend`.
        """
        assert self._in_place is not None, "the rows are only for kernels that exist"
        turning = None if rotation is None else Turning(rotation.cos, rotation.sin, rotation.interleaved)
        if isinstance(self._in_place, PagedAttention):
            self._in_place.attend(queries, rows, self._blocks, self._factor, heads, out, code_scale, turning)
        else:
            assert code_scale is None, "see attends_to_codes"
            assert turning is None, "see attends_to_turned"
            self._in_place.attend(queries, rows, self._blocks, self._factor, heads, out)

    def attends_chunks(self, heads: PagedHeads) -> bool:
        """Whether GPU kernels compute attention of chunks in place."""
        return isinstance(self._in_place, PagedAttention) and heads.vectors > 1

    def attend_chunks(self, queries: Tensor, chunks: PagedChunks, heads: PagedHeads, out: Tensor) -> None:
        """Attention of all chunks of a step in place, by the GPU kernels."""
        assert isinstance(self._in_place, PagedAttention), "see attends_chunks"
        self._in_place.attend_chunks(queries, chunks, self._blocks, self._factor, heads, out)

    def attends_context(self, heads: PagedHeads) -> bool:
        """Whether the CPU kernels compute attention of sequences in place."""
        return self._kernels is not None and attends_context(heads)

    def attend_context(self, queries: Tensor, start: int, blocks: Tensor, heads: PagedHeads, out: Tensor) -> None:
        """Attention of a sequence's tokens from position `start` on, in place, by the CPU kernels."""
        assert self._kernels is not None, "see attends_context"
        attend_context(self._kernels, queries, start, blocks, self._blocks, self._factor, heads, out)

    def read(self, blocks: Tensor) -> Tensor:
        """(tokens, vectors, size) of these blocks, in the compute type; valid until the next read."""
        values = self._scratch.gather(self._blocks, blocks).view(-1, *self._slots.shape[1:])
        if self._scale is None:
            return values
        if values.dtype is torch.int8:
            return values.to(self._dtype).mul_(self._scale)
        return from_e4m3(values.view(torch.float8_e4m3fn), self._dtype, self._scale)


def _writing_kernels(storage: Tensor, dtype: torch.dtype) -> StepKernels | None:
    """The kernels that write values of this type to a cache, if there are any."""
    kernels = step_kernels_for(storage.device, dtype)
    lacks = isinstance(kernels, FusedKernels) and storage.dtype is torch.uint8 and not kernels.e4m3
    return None if lacks else kernels


def _e4m3_bytes(values: Tensor, scale: float) -> Tensor:
    return quantize_fp8(values, scale).view(torch.uint8)
