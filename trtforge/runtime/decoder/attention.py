"""Paged attention: keys and values go to their slots, queries attend to the blocks of their own row.

Single-token rows are read in place by kernels, in C++ on the CPU and in Triton's language on CUDA; without these, they
are computed together in buckets of similar length.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trtforge.runtime.architecture.positions import ALL, Reach
from trtforge.runtime.architecture.rotary import Rotation
from trtforge.runtime.cuda.pinned import sent
from trtforge.runtime.decoder.kv_cache import LayerCache
from trtforge.runtime.decoder.latest import put_latest
from trtforge.runtime.decoder.padding import buckets, padded_rows
from trtforge.runtime.decoder.scores import FusedScores, Scores
from trtforge.runtime.decoder.sequence_states import Spans
from trtforge.runtime.native.bindings import PagedHeads, PagedRows
from trtforge.runtime.scheduling.batch import Ints, Step


@dataclass(frozen=True)
class GenerationRows:
    """Rows [first, end) of the step, one token each: their blocks, flattened; masks (rows, 1, 1, slots) by reach."""

    first: int
    end: int
    blocks: Tensor
    masks: Mapping[Reach, Tensor]


@dataclass(frozen=True)
class ContextRow:
    """Packed tokens [first, end) of one sequence, of which `start` tokens were computed before."""

    first: int
    end: int
    start: int
    blocks: Tensor

    def seen(self, vectors: Tensor, cache: LayerCache) -> Tensor:
        """What is cached of the sequence's tokens until the last one, (tokens, vectors, size); the step's `vectors`.

        One chunk with the whole context does not read the cache, unless that holds other numbers.
        """
        if self.start == 0 and cache.exact:
            return vectors[self.first : self.end]
        return cache.read(self.blocks)[: self.start + self.end - self.first]


@dataclass(frozen=True)
class Packed:
    """All context rows where each is a whole sequence: tokens [first, end).

    offsets: int32 (sequences + 1,), of each and the end, from `first` on; `longest`: tokens of a sequence.
    """

    first: int
    end: int
    offsets: Tensor
    longest: int

    @classmethod
    def of(cls, step: Step, rows: int, device: torch.device) -> "Packed | None":
        """Those of a step after `rows` single-token rows, if there are several."""
        counts = step.counts[rows:]
        if len(counts) < 2 or step.starts[rows:].any():
            return None
        offsets = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        first = int(step.counts[:rows].sum())
        return cls(first, first + int(offsets[-1]), sent(offsets, device), int(counts.max()))


@dataclass(frozen=True)
class Batch:
    """A step as tensors on the device that computes it.

    tokens, positions and logit_rows may be padded: there are `len(slots)` tokens, of which `wanted` give logits: the
    first ones where there are no `logit_rows`.
    length: total length of their sequence, 0 if unknown.
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
    """What it was made of, for layers that keep states of sequences."""
    windowed: "Batch | None" = None
    """The step as layers with windows see it, if they have blocks of their own."""
    packed: Packed | None = None
    """The context rows for a kernel that computes all of them, if there is one."""

    def seen_by(self, reach: Reach) -> "Batch":
        """The step as layers of this reach see it."""
        return self if self.windowed is None or reach.window is None else self.windowed

    @cached_property
    def spans(self) -> Spans:
        """The rows as layers with linear attention see them."""
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
        """The inputs that all layers share. `reaches`: those of the layers.

        `in_place`: the layers read the cache in place. `latest`: see `put_latest`.
        """
        held = -(-(step.starts + step.counts) // tokens_per_block)
        rows, ends = step.generation_rows, step.counts.cumsum()
        row_of, positions = step.positions()
        logit_rows = step.logit_rows()
        tokens, placed, wanted = (_packed(each, device, pads) for each in (step.tokens, positions, logit_rows))
        put_latest(tokens, step.tokens, latest)

        packed = Packed.of(step, rows, device) if device.type == "cuda" else None

        def seen(step: Step, reaches: tuple[Reach, ...]) -> Batch:
            """The step as layers of these reaches see it, whose blocks are in its tables."""
            generation = [] if in_place else _generation(step, held[:rows], tokens_per_block, device, dtype, reaches)
            context = tuple(
                ContextRow(
                    int(ends[row] - step.counts[row]),
                    int(ends[row]),
                    int(step.starts[row]),
                    sent(step.tables[row, : held[row]], device),
                )
                for row in range(rows, len(step.counts))
            )
            return cls(
                tokens=tokens,
                positions=placed,
                slots=_packed(step.slots(row_of, positions, tokens_per_block), device),
                logit_rows=wanted,
                wanted=len(logit_rows),
                length=step.length,
                generation=tuple(generation),
                context=context,
                paged=_paged(step, rows, tokens_per_block, device) if in_place and rows else None,
                step=step,
                packed=packed,
            )

        windowed = step.windowed
        if windowed is None:
            return seen(step, reaches)
        sliding = tuple(reach for reach in reaches if reach.window is not None)
        others = tuple(reach for reach in reaches if reach.window is None)
        return replace(seen(step, others), windowed=seen(windowed, sliding))


def _generation(
    step: Step,
    held: Ints,
    tokens_per_block: int,
    device: torch.device,
    dtype: torch.dtype,
    reaches: tuple[Reach, ...],
) -> list[GenerationRows]:
    """Buckets of the single-token rows, which hold `held` blocks each."""
    found = []
    held = np.maximum.accumulate(held)  # drafts of a row come before the next row, which may be shorter
    for first, end in buckets(held):
        columns = int(held[end - 1])
        blocks = sent(step.tables[first:end, :columns].reshape(-1), device)
        last = sent(step.starts[first:end], device).unsqueeze(1)
        keys = torch.arange(columns * tokens_per_block, device=device)
        masks = {reach: _mask(last, keys, dtype, reach).view(end - first, 1, 1, -1) for reach in reaches}
        found.append(GenerationRows(first, end, blocks, masks))
    return found


def apart(step: Step) -> bool:
    """Whether every row is the only one of its sequence, so that no row attends to what another one computes.

    Drafts are rows with the blocks of the row before; rows of other sequences have a last block of their own, but for
    rows that only pad a batch, which give no logits: they compute a token again whose block others may share.
    """
    return bool(step.wanted.all()) and not (step.tables[1:] == step.tables[:-1]).all(axis=1).any()


def _paged(step: Step, rows: int, tokens_per_block: int, device: torch.device) -> PagedRows:
    tables, lengths = np.ascontiguousarray(step.tables[:rows]), step.starts[:rows] + 1
    return PagedRows(sent(tables, device), sent(lengths, device), tokens_per_block, apart(step))


def _packed(values: Ints, device: torch.device, pads: bool = False) -> Tensor:
    """The integers on the device, followed by zeros if `pads`."""
    if pads and padded_rows(len(values)) > len(values):
        values = np.concatenate([values, np.zeros(padded_rows(len(values)) - len(values), dtype=np.int64)])
    return sent(values, device)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention of one rank's heads; rotated queries, keys and values come in one tensor.

    `latent`: one cached vector per token is both key and value.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scores: Scores
    reach: Reach = ALL
    latent: bool = False

    @cached_property
    def _paged(self) -> PagedHeads:
        scores = self.scores
        return PagedHeads(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            size=self.head_size,
            vectors=1 if self.latent else 2 * self.num_kv_heads,
            scale=scores.scale,
            cap=scores.cap,
            window=self.reach.window,
            slopes=None if scores.alibi is None else scores.alibi.slopes,
            chunk=self.reach.chunk,
            sinks=None if scores.sinks is None else scores.sinks.flatten(),
        )

    @property
    def _by_kernels(self) -> bool:
        """Whether the CPU kernels compute it: they make a bias of slopes only."""
        alibi = self.scores.alibi
        return alibi is None or not alibi.coarse

    def __call__(
        self,
        heads: Tensor,
        batch: Batch,
        cache: LayerCache,
        rotation: Rotation | None = None,
        code_scale: Tensor | None = None,
    ) -> Tensor:
        """(tokens, heads + cached vectors, head_size) to (tokens, heads x head_size); padding becomes zero.

        `rotation`: of queries and keys, if they are still to be rotated. `code_scale`: of what may be given instead,
        where it costs nothing: E4M3 of the result / code_scale.
        """
        seen = batch.seen_by(self.reach)
        queries, vectors = heads[:, : self.num_heads], heads[:, self.num_heads :]
        if rotation is not None and seen.paged is not None and self._turns(seen, heads, cache):
            return self._of_rows(queries, seen.paged, cache, code_scale, rotation)
        if rotation is not None:
            counts = {"queries": self.num_heads, "keys": self.num_kv_heads}
            if len(seen.slots) == len(heads) and cache.rotate_and_write(heads, rotation, seen.slots, **counts):
                return self._of_written(queries, vectors, seen, cache, code_scale)
            rotation.turn(heads[:, : self.num_heads + self.num_kv_heads])
        return self.of(queries, vectors, batch, cache, code_scale)

    def _turns(self, batch: Batch, heads: Tensor, cache: LayerCache) -> bool:
        """Whether one kernel rotates all heads, writes what is cached, and attends to it."""
        paged, tokens = batch.paged, len(batch.slots)
        only_rows = not batch.context and not batch.generation and tokens == len(heads)
        return paged is not None and paged.apart and only_rows and not self.latent and cache.attends_to_turned

    def _of_rows(
        self,
        queries: Tensor,
        rows: PagedRows,
        cache: LayerCache,
        code_scale: Tensor | None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """As a call, where all tokens are single-token rows of a GPU, which pads nothing."""
        dtype = queries.dtype if code_scale is None else torch.float8_e4m3fn
        out = torch.empty(len(queries), self.num_heads * self.head_size, dtype=dtype, device=queries.device)
        cache.attend(queries, rows, self._paged, out, code_scale, rotation)
        return out

    def of(
        self, queries: Tensor, vectors: Tensor, batch: Batch, cache: LayerCache, code_scale: Tensor | None = None
    ) -> Tensor:
        """As a call, of queries (tokens, heads, head_size) and what is cached (tokens, vectors, head_size)."""
        seen = batch.seen_by(self.reach)
        cache.write(seen.slots, vectors[: len(seen.slots)])
        return self._of_written(queries, vectors, seen, cache, code_scale)

    def _of_written(
        self, queries: Tensor, vectors: Tensor, batch: Batch, cache: LayerCache, code_scale: Tensor | None
    ) -> Tensor:
        """Of a step whose vectors are in the cache."""
        tokens = len(batch.slots)
        if len(batch.generation) == 1 and not batch.context and tokens == len(queries):
            return self._generate(queries, batch.generation[0], cache)
        if batch.paged is not None and code_scale is not None and cache.attends_to_codes and not batch.context:
            return self._of_rows(queries, batch.paged, cache, code_scale)
        out = queries.new_empty(len(queries), self.num_heads * self.head_size)
        out[tokens:] = 0
        if batch.paged is not None:
            cache.attend(queries, batch.paged, self._paged, out)
        for rows in batch.generation:
            out[rows.first : rows.end] = self._generate(queries[rows.first : rows.end], rows, cache)
        packed = batch.packed
        at_once = None if packed is None else self._at_once(packed, queries, vectors, cache)
        if packed is not None and at_once is not None:
            out[packed.first : packed.end] = at_once
            return out
        in_place = self._by_kernels and cache.attends_context(self._paged)
        for row in batch.context:
            own, into = queries[row.first : row.end], out[row.first : row.end]
            if in_place:
                cache.attend_context(own, row.start, row.blocks, self._paged, into)
            else:
                into.copy_(self.sequence(own, row.seen(vectors, cache), row.start))
        return out

    def _at_once(self, packed: Packed, queries: Tensor, vectors: Tensor, cache: LayerCache) -> Tensor | None:
        """(tokens, heads x head_size) of the whole sequences by one kernel, if it computes them."""
        scores, own = self.scores, queries[packed.first : packed.end]
        if self.latent or not cache.exact or not self._sees_all(packed.longest):
            return None
        if not isinstance(scores, FusedScores) or not scores.takes_packed(own):
            return None
        keys, values = self._split(vectors[packed.first : packed.end], 1)
        return scores.packed(own, keys, values, packed.offsets, packed.longest).flatten(1)

    def _generate(self, queries: Tensor, rows: GenerationRows, cache: LayerCache) -> Tensor:
        count = rows.end - rows.first
        vectors = cache.read(rows.blocks)
        keys, values = self._split(vectors.view(count, -1, *vectors.shape[1:]).transpose(1, 2), 1)
        grouped = queries.reshape(count, self.num_kv_heads, -1, self.head_size)
        return self.scores.one_query(grouped, keys, values, rows.masks[self.reach]).reshape(count, -1)

    def sequence(self, queries: Tensor, vectors: Tensor, start: int) -> Tensor:
        """Context phase of one sequence, from position `start` on.

        Queries (tokens, heads, head_size) to (tokens, heads x head_size).
        vectors (seen tokens, vectors, head_size): keys and values from position 0 on. A whole context usually needs no
        mask.
        """
        count, device = len(queries), queries.device
        queries = queries.transpose(0, 1)
        keys, values = self._split(vectors.transpose(0, 1), 0)
        if start == 0 and not self.scores.needs_mask and self._sees_all(count):
            return _joined(self.scores.sequence(queries, keys, values, None))
        pieces = []
        for first in range(0, count, self.scores.queries_at_once):
            end = min(count, first + self.scores.queries_at_once)
            seen = start + end
            positions = torch.arange(start + first, seen, device=device).unsqueeze(1)
            mask = _mask(positions, torch.arange(seen, device=device), queries.dtype, self.reach)
            found = self.scores.sequence(queries[:, first:end], keys[:, :seen], values[:, :seen], mask)
            pieces.append(_joined(found))
        return torch.cat(pieces)

    def _sees_all(self, count: int) -> bool:
        """Whether each of the first `count` tokens attends to all tokens before it."""
        return count <= min(self.reach.window or count, self.reach.chunk or count)

    def _split(self, vectors: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values from cached vectors, which are in dimension `dim`."""
        if self.latent:
            return vectors, vectors
        keys, values = vectors.chunk(2, dim)
        return keys, values


def _joined(found: Tensor) -> Tensor:
    """(heads, tokens, size) to (tokens, heads x size)."""
    return found.transpose(0, 1).flatten(1)


def _mask(queries: Tensor, keys: Tensor, dtype: torch.dtype, reach: Reach) -> Tensor:
    """Additive (queries, keys) mask from positions: 0 where a query sees a key, else minus infinity."""
    hidden = keys > queries
    if reach.window is not None:
        hidden |= keys <= queries - reach.window
    if reach.chunk is not None:
        hidden |= keys < queries - queries % reach.chunk
    return torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, float("-inf"))
