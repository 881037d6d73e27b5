"""A step's integers as tensors on the device that computes it, shared by all layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trtforge.runtime.architecture.positions import ALL, Reach
from trtforge.runtime.cuda.paged_chunks import PagedChunks
from trtforge.runtime.cuda.pinned import sent, sent_together
from trtforge.runtime.decoder.kv_cache import LayerCache
from trtforge.runtime.decoder.latest import put_latest
from trtforge.runtime.decoder.padding import buckets, padded_rows
from trtforge.runtime.decoder.sequence_states import Spans
from trtforge.runtime.native.bindings import PagedRows
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.draft_trees import TOLD, places_of
from trtforge.runtime.scheduling.integers import Ints
from trtforge.runtime.scheduling.virtual_tokens import VIRTUAL


@dataclass(frozen=True)
class GenerationRows:
    """Rows [first, end) of the step, one token each: their blocks, flattened; masks (rows, 1, 1, slots) by reach."""

    first: int
    end: int
    blocks: Tensor
    masks: Mapping[Reach, Tensor]


@dataclass(frozen=True)
class ContextRow:
    """Packed tokens [first, end) of one sequence, after `start` tokens computed before; `table`: its blocks."""

    first: int
    end: int
    start: int
    table: Ints
    device: torch.device

    @cached_property
    def blocks(self) -> Tensor:
        """Block numbers, int64, on the device."""
        return sent(self.table, self.device)

    def seen(self, vectors: Tensor, cache: LayerCache) -> Tensor:
        """The cached vectors of the sequence's tokens up to the last one, (tokens, vectors, size).

        A chunk with the whole context uses the step's `vectors` instead, unless the cache stores rounded values.
        """
        if self.start == 0 and cache.exact:
            return vectors[self.first : self.end]
        return cache.read(self.blocks)[: self.start + self.end - self.first]


@dataclass(frozen=True)
class Packed:
    """The context rows of a step in which each is a whole sequence: tokens [first, end).

    `offsets`: int32 (sequences + 1,), the start of each sequence and the end, relative to `first`; `longest`: tokens of
    the longest sequence.
    """

    first: int
    end: int
    offsets: Tensor
    longest: int

    @classmethod
    def of(cls, step: Step, rows: int, device: torch.device) -> "Packed | None":
        """The rows after a step's `rows` single-token rows; None unless they are several whole sequences."""
        counts = step.counts[rows:]
        if len(counts) < 2 or step.starts[rows:].any():
            return None
        offsets = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        first = int(step.counts[:rows].sum())
        return cls(first, first + int(offsets[-1]), sent(offsets, device), int(counts.max()))


@dataclass(frozen=True)
class VirtualRows:
    """Packed tokens that are rows of prompt tables. `places` (tokens,): their indices; `vectors` (tokens, hidden or
    more): the rows."""

    places: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, step: Step, dtype: torch.dtype, device: torch.device) -> "VirtualRows | None":
        """The virtual rows of a step; None without any."""
        places = np.flatnonzero(step.tokens >= VIRTUAL) if len(step.embeddings) else step.tokens[:0]
        if not len(places):  # a micro-batch may contain none of the step's virtual rows
            return None
        vectors = torch.from_numpy(step.embeddings[step.tokens[places] - VIRTUAL]).view(dtype)
        return cls(sent(places, device), vectors.to(device))


@dataclass(frozen=True)
class Batch:
    """A step as tensors on the device that computes it.

    `tokens`, `positions` and `logit_rows` may be padded: the step has `len(slots)` tokens, of which `wanted` give
    logits, the first ones if `logit_rows` is None.
    `length`: total length of the tokens' sequence, 0 if unknown.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor | None
    wanted: int
    length: int
    generation: tuple[GenerationRows, ...]
    context: tuple[ContextRow, ...]
    paged: PagedRows | None = None
    """The single-token rows for kernels that read the cache in place; `generation` is empty then."""
    step: Step | None = None
    """The step that the batch was made from, for layers that keep states of sequences."""
    windowed: "Batch | None" = None
    """The step as sliding-window layers see it, if they have separate blocks."""
    packed: Packed | None = None
    """The context rows for a kernel that computes all of them at once."""
    chunks: PagedChunks | None = None
    """The context rows for a kernel that reads the cache in place."""
    virtual: VirtualRows | None = None
    """The tokens, 0 in `tokens`, whose embeddings come with the step."""

    def seen_by(self, reach: Reach) -> "Batch":
        """The step as layers with this reach see it."""
        return self if self.windowed is None or reach.window is None else self.windowed

    @cached_property
    def spans(self) -> Spans:
        """The rows as linear attention layers see them."""
        assert self.step is not None, "see `of`"
        return Spans.of(self.step)

    @classmethod
    def of(
        cls,
        step: Step,
        tokens_per_block: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        reaches: tuple[Reach, ...] = (ALL,),
        pads: bool = False,
        in_place: bool = False,
        latest: Tensor | None = None,
    ) -> "Batch":
        """The inputs that all layers share. `reaches`: the distinct reaches of the layers.

        `pads`: see `padded_rows`. `in_place`: the layers read the cache in place. `latest`: see `put_latest`.
        """
        virtual = VirtualRows.of(step, dtype, device)
        if virtual is not None:
            step = replace(step, tokens=np.where(step.tokens >= VIRTUAL, 0, step.tokens))
        held = -(-(step.starts + step.counts) // tokens_per_block)
        rows, ends = step.generation_rows, step.counts.cumsum()
        row_of, positions = step.positions()
        logit_rows = step.logit_rows()
        places = places_of(positions, row_of, step.seen)
        padded = (_padded(each) if pads else each for each in (step.tokens, places, logit_rows))
        slots = step.slots(row_of, positions, tokens_per_block)
        tokens, placed, wanted, own_slots = sent_together([*padded, slots], device)
        put_latest(tokens, step.tokens, latest)

        packed = Packed.of(step, rows, device) if device.type == "cuda" else None

        def seen(step: Step, reaches: tuple[Reach, ...], slots: Tensor) -> Batch:
            """The step as layers with these reaches see it; its tables contain their blocks."""
            generation = [] if in_place else _generation(step, held[:rows], tokens_per_block, device, dtype, reaches)
            context = tuple(
                ContextRow(
                    int(ends[row] - step.counts[row]),
                    int(ends[row]),
                    int(step.starts[row]),
                    step.tables[row, : held[row]],
                    device,
                )
                for row in range(rows, len(step.counts))
            )
            return cls(
                tokens=tokens,
                positions=placed,
                slots=slots,
                logit_rows=wanted,
                wanted=len(logit_rows),
                length=step.length,
                generation=tuple(generation),
                context=context,
                paged=_paged(step, rows, tokens_per_block, device) if in_place and rows else None,
                step=step,
                packed=packed,
                chunks=_chunks(step, rows, tokens_per_block, device) if in_place and context else None,
                virtual=virtual,
            )

        windowed = step.windowed
        if windowed is None:
            return seen(step, reaches, own_slots)
        sliding = tuple(reach for reach in reaches if reach.window is not None)
        others = tuple(reach for reach in reaches if reach.window is None)
        sliding_slots = sent(windowed.slots(row_of, positions, tokens_per_block), device)
        return replace(seen(step, others, own_slots), windowed=seen(windowed, sliding, sliding_slots))


def _generation(
    step: Step,
    held: Ints,
    tokens_per_block: int,
    device: torch.device,
    dtype: torch.dtype,
    reaches: tuple[Reach, ...],
) -> list[GenerationRows]:
    """Buckets of the single-token rows, which have `held` blocks each."""
    found = []
    held = np.maximum.accumulate(held)  # drafts of a row come before the next row, which may be shorter
    for first, end in buckets(held):
        columns = int(held[end - 1])
        blocks = sent(step.tables[first:end, :columns].reshape(-1), device)
        last = sent(step.starts[first:end], device).unsqueeze(1)
        keys = torch.arange(columns * tokens_per_block, device=device)
        hidden = sent(step.seen[first:end], device).unsqueeze(1) if len(step.seen) else None
        masks = {reach: mask_of(last, keys, dtype, reach, hidden).view(end - first, 1, 1, -1) for reach in reaches}
        found.append(GenerationRows(first, end, blocks, masks))
    return found


def apart(step: Step) -> bool:
    """Whether every row is the only one of its sequence, so that no row attends to another row's keys and values.

    Drafts have the same blocks as the row before them. Rows of different sequences have different last blocks, except
    padding rows, which give no logits: they recompute a token whose block others may share.
    """
    return bool(step.wanted.all()) and not (step.tables[1:] == step.tables[:-1]).all(axis=1).any()


def _paged(step: Step, rows: int, tokens_per_block: int, device: torch.device) -> PagedRows:
    numbers = [np.ascontiguousarray(step.tables[:rows]), step.starts[:rows] + 1, step.seen[:rows]]
    tables, lengths, seen = sent_together(numbers, device)
    return PagedRows(tables, lengths, tokens_per_block, apart(step), seen if len(seen) else None)


def _chunks(step: Step, rows: int, tokens_per_block: int, device: torch.device) -> PagedChunks:
    """The chunks of a step, after its `rows` single-token rows."""
    firsts, longest = step.counts.cumsum() - step.counts, int((step.starts + step.counts)[rows:].max())
    tables = step.tables[rows:, : -(-longest // tokens_per_block)]
    return PagedChunks((firsts[rows:], step.starts[rows:], step.counts[rows:]), tables, tokens_per_block, device)


def _padded(values: Ints) -> Ints:
    """The integers, zero-padded to `padded_rows`."""
    return np.concatenate([values, np.zeros(padded_rows(len(values)) - len(values), dtype=np.int64)])


def mask_of(queries: Tensor, keys: Tensor, dtype: torch.dtype, reach: Reach, seen: Tensor | None = None) -> Tensor:
    """Additive (queries, keys) mask from positions: 0 where a query sees a key, else minus infinity.

    seen (queries, 1): see `seen_slots`.
    """
    hidden = keys > queries
    if seen is not None:
        before = queries - keys
        hidden |= (before < TOLD) & (seen >> (TOLD - 1 - before).clamp(0, TOLD - 1) & 1 == 0)
    if reach.window is not None:
        hidden |= keys <= queries - reach.window
    if reach.chunk is not None:
        hidden |= keys < queries - queries % reach.chunk
    return torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, float("-inf"))
