"""Attention that reads the KV cache in place, by Triton kernels if torch's CUDA build includes Triton.

TRTFORGE_KERNELS=torch turns it off; attention then gathers blocks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtforge.runtime.cuda.launcher import Launcher, launcher_for
from trtforge.runtime.cuda.paged_chunks import PagedChunks
from trtforge.runtime.cuda.triton_support import power_from, processors_of, runs_triton
from trtforge.runtime.native.bindings import PagedHeads, PagedRows

LARGEST = 256
"""Maximum size of a head: larger ones (the latent vectors of DeepSeek-V2) do not fit a program's registers."""
_WIDE, _WIDEST = 256, 512  # bytes of a head's vector, above which programs use smaller tiles
_MANY_BYTES = 1 << 15  # of a program's query heads, from which it gets more warps
_MOST_SPLITS = 32
_LEAST_TOKENS = 256  # tokens of a split: computing fewer takes about as long as combining one more split
_PROGRAMS = 2  # per multiprocessor: the fewest that keep its memory busy
_LEAST_SIDE = 16  # smallest dimension of a matrix product
_STAGES = 2  # of pipelined loads: 5 to 15 % less time than with 3 on an H200
_STAGES_OF_PARTS = 1  # for split contexts, whose loops are short
_TILES = (16, 64, 128)  # query tile sizes for chunks


@dataclass(frozen=True)
class _Tile:
    """Tile of a program: its number of queries, and the number of cached tokens that they attend to at once."""

    queries: int
    tokens: int
    warps: int


def tile_for(tokens: int, size: int, itemsize: int) -> _Tile:
    """The tile for chunks of at most `tokens` tokens and heads of `size` elements of `itemsize` bytes.

    More queries would not fit the 99 KB of shared memory per program on SM 8.6 or, in float32, the registers: with 128
    queries of 64 elements a thread spilled 10 KB to local memory, which the driver reserves for every thread that may
    run.
    """
    bytes_of_head = size * itemsize
    most = _TILES[0] if bytes_of_head > _WIDEST else _TILES[2] if itemsize == 2 and size <= 128 else _TILES[1]
    queries = min(most, next((each for each in _TILES if each >= tokens), most))
    few = queries == _TILES[0] and bytes_of_head <= _WIDEST
    return _Tile(queries, 64 if most == _TILES[2] else 32, warps=4 if few else 8)


def tile_of_rows(group: int, size: int, itemsize: int) -> _Tile:
    """The tile for single-token rows: `group` query heads of a KV head, of `size` elements of `itemsize` bytes.

    In float32, more tokens with many heads would not fit the registers, see `tile_for`.
    """
    queries = max(_LEAST_SIDE, power_from(group))
    wide = size * itemsize > _WIDE or (itemsize == 4 and queries > _LEAST_SIDE)
    return _Tile(queries, 32 if wide else 64, warps=8 if queries * size * itemsize >= _MANY_BYTES else 4)


@dataclass(frozen=True)
class Turning:
    """Cosines and sines (rows, 1, dim) that rotate the first `dim` elements of heads; see `rotate`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


class PagedAttention:
    """Launches the kernels of the modules `paged_kernels`, for single-token rows, and `chunk_kernels`, for chunks.

    `processors`: number of multiprocessors of the GPU. One layer uses an instance.
    """

    def __init__(self, rows: Any, chunks: Any, launch: Launcher, processors: int, device: torch.device) -> None:
        self._of_rows = rows
        self._of_chunks = chunks
        self._launch = launch
        self._processors = processors
        self._arrived = torch.zeros(_PROGRAMS * processors // 2, dtype=torch.int32, device=device)
        """Counters of finished splits, for each row and KV head or tile and head; without splits if there are more of
        these than counters, see `splits_for`."""

    def attends(self, size: int) -> bool:
        """Whether the kernels support heads of this size."""
        return size <= LARGEST

    def attend(
        self,
        queries: Tensor,
        rows: PagedRows,
        storage: Tensor,
        cache_scale: float,
        how: PagedHeads,
        out: Tensor,
        code_scale: Tensor | None = None,
        turning: Turning | None = None,
    ) -> None:
        """Row i: the first `how.heads` of queries[i] attend to their context in `storage`, into out[i].

        queries (rows or more, heads or more, size), out (rows or more, heads x size), float32, bfloat16 or float16;
        storage (blocks, tokens per block, vectors, size) of that type, or uint8 (E4M3) or int8 of values / cache_scale.
        `code_scale` (1,): of `out`, if that is E4M3. `turning`: if given, the kernel rotates queries and keys, and
        writes each row's key and value, which follow the `how.heads` queries, to `storage`; then no row may attend to
        another row's new key.
        """
        count, group = len(rows.lengths), how.heads // how.kv_heads
        columns = rows.tables.shape[1]
        splits = splits_for(count * how.kv_heads, columns * rows.block_size, self._processors)
        sums, largest, totals = self._partial(out, (count, how.heads, splits), how.size)
        size_padded = max(_LEAST_SIDE, power_from(how.size))
        tile = tile_of_rows(group, size_padded, queries.element_size())
        self._launch(
            self._of_rows.attend_paged,
            (count, how.kv_heads, splits),
            queries,
            storage,
            rows.tables,
            rows.lengths,
            queries if how.slopes is None else how.slopes,
            queries if how.sinks is None else how.sinks,
            queries if rows.seen is None else rows.seen,
            out,
            sums,
            largest,
            totals,
            self._arrived,
            queries if code_scale is None else code_scale,
            *((queries, queries) if turning is None else (turning.cos, turning.sin)),
            how.scale,
            cache_scale,
            how.cap or 1.0,
            *queries.stride()[:2],
            *storage.stride()[:3],
            *rows.tables.stride(),
            out.stride(0),
            VALUES=0 if how.vectors == 1 else how.kv_heads,
            GROUP=group,
            GROUP_PADDED=tile.queries,
            SIZE=how.size,
            SIZE_PADDED=size_padded,
            BLOCK=rows.block_size,
            TOKENS=tile.tokens,
            SPLITS=splits,
            WINDOW=how.window or 0,
            CHUNK=how.chunk or 0,
            CAPPED=how.cap is not None,
            BIASED=how.slopes is not None,
            SINKS=how.sinks is not None,
            TREES=rows.seen is not None,
            E4M3=storage.dtype is torch.uint8,
            DIM=0 if turning is None else turning.cos.shape[-1],
            INTERLEAVED=turning is not None and turning.interleaved,
            warps=tile.warps,
            stages=_STAGES if splits == 1 else _STAGES_OF_PARTS,
        )

    def attend_chunks(
        self,
        queries: Tensor,
        chunks: PagedChunks,
        storage: Tensor,
        cache_scale: float,
        how: PagedHeads,
        out: Tensor,
    ) -> None:
        """The chunks' tokens attend to their sequences, whose keys and values are all in `storage`.

        Tensors are as in `attend`, with a row for each token of the step; rows of other tokens in `out` stay unchanged.
        """
        size_padded = max(_LEAST_SIDE, power_from(how.size))
        tile = tile_for(chunks.most_tokens, size_padded, queries.element_size())
        tiles = chunks.tiles(tile.queries)
        seen = min(chunks.longest, (how.window or chunks.longest) + tile.queries)
        splits = splits_for(len(tiles) * how.heads, seen, self._processors)
        sums, largest, totals = self._partial(out, (len(out), how.heads, splits), how.size)
        self._launch(
            self._of_chunks.attend_chunks,
            (how.heads, len(tiles), splits),
            queries,
            storage,
            chunks.rows,
            chunks.tables,
            tiles,
            queries if how.slopes is None else how.slopes,
            queries if how.sinks is None else how.sinks,
            out,
            sums,
            largest,
            totals,
            self._arrived,
            how.scale,
            cache_scale,
            how.cap or 1.0,
            *queries.stride()[:2],
            *storage.stride()[:3],
            chunks.tables.stride(0),
            out.stride(0),
            VALUES=how.kv_heads,
            GROUP=how.heads // how.kv_heads,
            SIZE=how.size,
            SIZE_PADDED=size_padded,
            BLOCK=chunks.block_size,
            QUERIES=tile.queries,
            TOKENS=tile.tokens,
            SPLITS=splits,
            WINDOW=how.window or 0,
            CHUNK=how.chunk or 0,
            CAPPED=how.cap is not None,
            BIASED=how.slopes is not None,
            SINKS=how.sinks is not None,
            warps=tile.warps,
            stages=_STAGES,
        )

    @staticmethod
    def _partial(out: Tensor, shape: tuple[int, int, int], size: int) -> tuple[Tensor, Tensor, Tensor]:
        """float32 memory for the splits' results, not needed with one split: sums, largest scores and totals."""
        if shape[-1] == 1:
            return out, out, out
        sums = out.new_empty((*shape, size), dtype=torch.float32)
        return sums, sums.new_empty(shape), sums.new_empty(shape)


def splits_for(programs: int, longest: int, processors: int) -> int:
    """Number of parts to split each context into, a power of two: enough to occupy the GPU, if parts do not get much
    shorter than `_LEAST_TOKENS`.

    `programs`: rows times KV heads, or tiles times heads; `longest`: tokens that one of them may attend to.
    """
    wanted = min(_PROGRAMS * processors // max(1, programs), longest // _LEAST_TOKENS, _MOST_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def paged_attention_for(device: torch.device) -> PagedAttention | None:
    """The kernels for one layer on this device, if available."""
    if not runs_triton(device):
        return None
    from trtforge.runtime.cuda import chunk_kernels, paged_kernels

    index = device.index or 0
    return PagedAttention(paged_kernels, chunk_kernels, launcher_for(index), processors_of(index), device)
