"""Paged attention: keys and values are written to their slots, queries attend to the blocks of their own row.

Kernels (C++ on the CPU, Triton on CUDA) read the cache in place, for single-token rows and for chunks of prompts.
Without kernels, blocks are gathered; single-token rows are computed together in buckets of similar length.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trtforge.runtime.architecture.positions import ALL, Reach
from trtforge.runtime.architecture.rotary import Rotation
from trtforge.runtime.cuda.paged_chunks import PagedChunks
from trtforge.runtime.decoder.batch import Batch, GenerationRows, Packed, mask_of
from trtforge.runtime.decoder.kv_cache import LayerCache
from trtforge.runtime.decoder.scores import FusedScores, Scores
from trtforge.runtime.native.bindings import PagedHeads, PagedRows


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
        """Whether kernels can compute this attention: they do not support `coarse` ALiBi."""
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

        `rotation`: of queries and keys, if they are still to be rotated. `code_scale`: the result may then be E4M3
        codes of result / code_scale, if that costs nothing.
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
        """Whether one kernel rotates all heads, writes the cache and attends to it."""
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
        """Like `__call__`, if all tokens are single-token rows on a GPU, where nothing is padded."""
        dtype = queries.dtype if code_scale is None else torch.float8_e4m3fn
        out = torch.empty(len(queries), self.num_heads * self.head_size, dtype=dtype, device=queries.device)
        cache.attend(queries, rows, self._paged, out, code_scale, rotation)
        return out

    def of(
        self, queries: Tensor, vectors: Tensor, batch: Batch, cache: LayerCache, code_scale: Tensor | None = None
    ) -> Tensor:
        """Like `__call__`, for queries (tokens, heads, head_size) and vectors to cache (tokens, vectors, head_size)."""
        seen = batch.seen_by(self.reach)
        cache.write(seen.slots, vectors[: len(seen.slots)])
        return self._of_written(queries, vectors, seen, cache, code_scale)

    def _of_written(
        self, queries: Tensor, vectors: Tensor, batch: Batch, cache: LayerCache, code_scale: Tensor | None
    ) -> Tensor:
        """Attention of a step whose keys and values are already in the cache."""
        tokens = len(batch.slots)
        if len(batch.generation) == 1 and not batch.context and tokens == len(queries):
            return self._generate(queries, batch.generation[0], cache)
        if batch.paged is not None and code_scale is not None and cache.attends_to_codes and not batch.context:
            return self._of_rows(queries, batch.paged, cache, code_scale)
        chunks = batch.chunks
        make = queries.new_zeros if chunks is not None and chunks.padded else queries.new_empty
        out = make(len(queries), self.num_heads * self.head_size)
        out[tokens:] = 0
        if batch.paged is not None:
            cache.attend(queries, batch.paged, self._paged, out)
        for rows in batch.generation:
            out[rows.first : rows.end] = self._generate(queries[rows.first : rows.end], rows, cache)
        packed = batch.packed
        at_once = None if packed is None else self._at_once(packed, queries, vectors, cache)
        if packed is not None and at_once is not None:
            return _put(at_once, out, packed.first)
        if chunks is not None and self._in_place(chunks, cache):
            cache.attend_chunks(queries, chunks, self._paged, out)
            return out
        in_place = self._by_kernels and cache.attends_context(self._paged)
        for row in batch.context:
            own, into = queries[row.first : row.end], out[row.first : row.end]
            if in_place:
                cache.attend_context(own, row.start, row.blocks, self._paged, into)
            else:
                out = _put(self.sequence(own, row.seen(vectors, cache), row.start), out, row.first)
        return out

    def _in_place(self, chunks: PagedChunks, cache: LayerCache) -> bool:
        """Whether GPU kernels read the chunks' cache; torch's FlashAttention is faster if it needs no gathered copy."""
        if not self._by_kernels or not cache.attends_chunks(self._paged):
            return False
        plain = cache.exact and isinstance(self.scores, FusedScores) and self._sees_all(chunks.most_tokens)
        return not plain or not chunks.whole

    def _at_once(self, packed: Packed, queries: Tensor, vectors: Tensor, cache: LayerCache) -> Tensor | None:
        """Attention of all whole sequences by one kernel, (tokens, heads x head_size); None if it cannot compute it."""
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
            mask = mask_of(positions, torch.arange(seen, device=device), queries.dtype, self.reach)
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


def _put(found: Tensor, out: Tensor, first: int) -> Tensor:
    """`out` with the rows `found` from `first` on; `found` itself if it has all rows."""
    if len(found) == len(out):
        return found
    out[first : first + len(found)] = found
    return out


def _joined(found: Tensor) -> Tensor:
    """(heads, tokens, size) to (tokens, heads x size)."""
    return found.transpose(0, 1).flatten(1)
