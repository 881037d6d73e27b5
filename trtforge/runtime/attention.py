"""Paged attention: keys and values go to their slots, queries attend to the blocks of their own row.

A layer's cache is one tensor (blocks, tokens_per_block, 2 x kv_heads, head_size), keys before values, so that a step
writes and gathers both at once. Rows of one token are computed together in buckets of similar length.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trtforge.models.transforms import quantize_fp8
from trtforge.runtime.batch import Ints, Step, buckets, padded_rows
from trtforge.runtime.float8 import from_e4m3

_QUERIES_AT_ONCE = 1024  # bounds the mask of a context that continues an earlier chunk


@dataclass(frozen=True)
class GenerationRows:
    """Rows [first, end) of the step, one token each: their blocks, flattened, and the mask (rows, 1, 1, slots)."""

    first: int
    end: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ContextRow:
    """Packed tokens [first, end) of one sequence, of which `start` tokens were computed before."""

    first: int
    end: int
    start: int
    blocks: Tensor


@dataclass(frozen=True)
class Batch:
    """A step as tensors on the device that computes it.

    tokens, positions and logit_rows may be padded: there are `len(slots)` tokens, of which `wanted` give logits.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    wanted: int
    generation: tuple[GenerationRows, ...]
    context: tuple[ContextRow, ...]

    @classmethod
    def of(
        cls,
        step: Step,
        tokens_per_block: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        window: int | None = None,
        pads: bool = False,
    ) -> "Batch":
        """Everything that the layers share. `window`: tokens that a query sees, itself included; None is all."""
        held = -(-(step.starts + step.counts) // tokens_per_block)
        rows = step.generation_rows
        generation = []
        for first, end in buckets(held[:rows]):
            columns = int(held[end - 1])
            blocks = torch.from_numpy(step.tables[first:end, :columns].reshape(-1)).to(device)
            last = torch.from_numpy(step.starts[first:end]).to(device).unsqueeze(1)
            mask = _mask(last, torch.arange(columns * tokens_per_block, device=device), dtype, window)
            generation.append(GenerationRows(first, end, blocks, mask.view(end - first, 1, 1, -1)))
        ends = step.counts.cumsum()
        row_of, positions = step.positions()
        context = tuple(
            ContextRow(
                int(ends[row] - step.counts[row]),
                int(ends[row]),
                int(step.starts[row]),
                torch.from_numpy(step.tables[row, : held[row]]).to(device),
            )
            for row in range(rows, len(step.counts))
        )
        logit_rows = step.logit_rows()
        return cls(
            tokens=_packed(step.tokens, device, pads),
            positions=_packed(positions, device, pads),
            slots=_packed(step.slots(row_of, positions, tokens_per_block), device),
            logit_rows=_packed(logit_rows, device, pads),
            wanted=len(logit_rows),
            generation=tuple(generation),
            context=context,
        )


def _packed(values: Ints, device: torch.device, pads: bool = False) -> Tensor:
    """The integers on the device, followed by zeros if `pads`."""
    if pads and padded_rows(len(values)) > len(values):
        values = np.concatenate([values, np.zeros(padded_rows(len(values)) - len(values), dtype=np.int64)])
    return torch.from_numpy(values).to(device)


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
    """Keys and values of one layer. With `scale`, they are stored as E4M3 of value / scale."""

    def __init__(self, storage: Tensor, scale: float | None, dtype: torch.dtype, scratch: Scratch) -> None:
        self._blocks = storage
        self._scratch = scratch
        self._slots = storage.view(-1, *storage.shape[2:])
        self._scale = scale
        self._dtype = dtype
        self.exact = scale is None

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Store (tokens, 2 x kv_heads, head_size)."""
        if self._scale is not None:
            values = quantize_fp8(values, self._scale).view(torch.uint8)
        self._slots.index_copy_(0, slots, values)

    def read(self, blocks: Tensor) -> Tensor:
        """(tokens, 2 x kv_heads, head_size) of these blocks, in the compute type; valid until the next read."""
        values = self._scratch.gather(self._blocks, blocks).view(-1, *self._slots.shape[1:])
        if self._scale is not None:
            return from_e4m3(values.view(torch.float8_e4m3fn), self._dtype, self._scale)
        return values


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention of one rank's heads; rotated queries, keys and values come in one tensor."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None

    def __call__(self, heads: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """(tokens, heads + 2 x kv_heads, head_size) to (tokens, heads x head_size); padding becomes zero."""
        tokens = len(batch.slots)
        cache.write(batch.slots, heads[:tokens, self.num_heads :])
        if len(batch.generation) == 1 and not batch.context and tokens == len(heads):
            return self._generate(heads[:, : self.num_heads], batch.generation[0], cache)
        out = torch.empty(len(heads), self.num_heads * self.head_size, dtype=heads.dtype, device=heads.device)
        out[tokens:] = 0
        for rows in batch.generation:
            out[rows.first : rows.end] = self._generate(heads[rows.first : rows.end, : self.num_heads], rows, cache)
        for row in batch.context:
            out[row.first : row.end] = self._context(heads[row.first : row.end], row, cache)
        return out

    def _generate(self, queries: Tensor, rows: GenerationRows, cache: LayerCache) -> Tensor:
        """One query a row. The heads that share a key are folded into the query dimension: no key is repeated."""
        count = rows.end - rows.first
        kv = cache.read(rows.blocks).view(count, -1, 2 * self.num_kv_heads, self.head_size).transpose(1, 2)
        folded = queries.reshape(count, self.num_kv_heads, -1, self.head_size)
        keys, values = kv[:, : self.num_kv_heads], kv[:, self.num_kv_heads :]
        found = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=rows.mask)
        return found.reshape(count, -1)

    def _context(self, heads: Tensor, row: ContextRow, cache: LayerCache) -> Tensor:
        count = row.end - row.first
        whole = row.start == 0 and cache.exact and (self.window is None or count <= self.window)
        kv = heads[:, self.num_heads :] if whole else cache.read(row.blocks)
        keys, values = kv[:, : self.num_kv_heads], kv[:, self.num_kv_heads :]
        if whole:
            return self._attend(heads[:, : self.num_heads], keys, values, None)
        pieces = []
        for first in range(0, count, _QUERIES_AT_ONCE):
            end = min(count, first + _QUERIES_AT_ONCE)
            seen = row.start + end
            positions = torch.arange(row.start + first, seen, device=heads.device).unsqueeze(1)
            mask = _mask(positions, torch.arange(seen, device=heads.device), heads.dtype, self.window)
            pieces.append(self._attend(heads[first:end, : self.num_heads], keys[:seen], values[:seen], mask))
        return torch.cat(pieces)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """One sequence: (tokens, heads, head_size) each; causal where no mask is given."""
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (queries, keys, values))
        found = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.num_heads != self.num_kv_heads
        )
        return found[0].transpose(0, 1).reshape(len(queries), -1)


def _mask(queries: Tensor, keys: Tensor, dtype: torch.dtype, window: int | None) -> Tensor:
    """Additive (queries, keys) mask from positions: 0 where a query sees a key, else minus infinity."""
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, float("-inf"))
