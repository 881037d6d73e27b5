"""Reads source rows in slabs, in the order of their use, on a read-ahead thread."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.convert.finite import FiniteWeights
from trtforge.formats.shards import RowReader, StoredTensor
from trtforge.formats.source_digest import SourceDigests
from trtforge.models.content import Absorbed, Content, Piece, pieces_of
from trtforge.models.split import Cut

SLAB_BYTES = 2 << 20  # stays in the CPU cache from read to write
COLUMN_BLOCK_BYTES = 16 << 20  # of a transposed source, read in parts of file rows: larger blocks need fewer reads
_AHEAD = 3

Slab = NDArray[Any]
"""(rows, columns) of a source, its elements as integers of the same size: numpy has no bfloat16 and no FP8."""


@dataclass(frozen=True)
class Read:
    """Rows of a source's (out, in) matrix; `transposed`: they are columns in the file."""

    source: str
    rows: range
    transposed: bool = False


def reads_of(content: Content, sources: Mapping[str, StoredTensor]) -> Iterator[Read]:
    """The reads of a target, in the order of their use."""
    match content:
        case Absorbed():
            for heads in content.heads:
                for head in heads:
                    yield from absorbed_reads(content, head)
        case _:
            for piece in pieces_of(content):
                yield from piece_reads(piece, sources)


def piece_reads(piece: Piece, sources: Mapping[str, StoredTensor]) -> Iterator[Read]:
    """Reads of the rows that any rank gets; all but the last have an even number, to keep INT4 row pairs whole."""
    size = COLUMN_BLOCK_BYTES if piece.transposed else SLAB_BYTES
    step = max(2, size // _bytes_of_row(piece.source, piece.transposed, sources) // 2 * 2)
    for wanted in union(piece.cuts):
        for start in range(wanted.start, wanted.stop, step):
            yield Read(piece.source, range(start, min(wanted.stop, start + step)), piece.transposed)


def absorbed_reads(content: Absorbed, head: int) -> tuple[Read, Read]:
    """The rows of one head in the query and in the key."""
    query, key = content.nope + content.rope, content.nope + content.value
    return (
        Read(content.query.source, range(head * query, (head + 1) * query)),
        Read(content.key.source, range(head * key, (head + 1) * key)),
    )


def union(cuts: tuple[Cut, ...]) -> list[range]:
    """The rows that are in any cut, as ascending ranges."""
    found: list[range] = []
    for rows in sorted({rows for cut in cuts for rows in cut.rows}, key=lambda rows: (rows.start, rows.stop)):
        if found and rows.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, rows.stop))
        else:
            found.append(rows)
    return found


class Slabs:
    """The slabs of `contents` in order; each is valid until the next `take`.

    Memory: `_AHEAD` + 1 buffers of the largest read. While reading, the bytes are hashed and checked by `finite`.
    `release`: called before a slab that was taken is overwritten.
    """

    def __init__(
        self,
        contents: Sequence[Content],
        sources: Mapping[str, StoredTensor],
        digests: SourceDigests,
        finite: FiniteWeights | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._release = release
        self._sources, self._digests, self._finite = sources, digests, finite or FiniteWeights()
        self._last_use: dict[str, int] = {}
        size = 0
        for number, read in enumerate(_all_reads(contents, sources)):
            self._last_use[read.source] = number
            size = max(size, len(read.rows) * _bytes_of_row(read.source, read.transposed, sources))
        self._buffers = [memoryview(bytearray(size)) for _ in range(_AHEAD + 1)]
        self._reader = RowReader(digests.saw)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trtforge-read")
        self._coming = enumerate(_all_reads(contents, sources))
        self._pending: deque[tuple[Read, Future[Slab]]] = deque()
        self._submit()

    def take(self, read: Read) -> Slab:
        """The slab of `read`, which must be the next one in the order of the contents."""
        expected, slab = self._pending.popleft()
        assert expected == read, f"{read} was taken where {expected} was expected"
        self._release()
        self._submit()
        return slab.result()

    def _submit(self) -> None:
        """Read ahead into every buffer except the one in use."""
        for number, read in islice(self._coming, _AHEAD - len(self._pending)):
            self._pending.append((read, self._thread.submit(self._fetch, number, read)))

    def _fetch(self, number: int, read: Read) -> Slab:
        stored, buffer = self._sources[read.source], self._buffers[number % len(self._buffers)]
        element = np.dtype(f"i{stored.spec.dtype.size}")
        start, stop = read.rows.start, read.rows.stop
        if read.transposed:
            data = self._reader.read_columns(stored, start, stop, buffer)
            self._finite.look(stored, range(stored.spec.shape[0]), read.rows, data)
            slab = np.frombuffer(data, element).reshape(-1, stop - start).T
        else:
            data = self._reader.read(stored, start, stop, buffer)
            self._finite.look(stored, read.rows, range(stored.spec.row_bytes // stored.spec.dtype.size), data)
            slab = np.frombuffer(data, element).reshape(stop - start, -1)
        if self._last_use[read.source] == number:
            self._digests.of_tensor(read.source)  # now, while the bytes of unread rows are still in the page cache
        return slab

    def close(self) -> None:
        """Stop reading and close the files."""
        self._thread.shutdown(cancel_futures=True)
        self._reader.close()

    def __enter__(self) -> "Slabs":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _all_reads(contents: Sequence[Content], sources: Mapping[str, StoredTensor]) -> Iterator[Read]:
    """All reads in order; lazy, because a large model has hundreds of thousands."""
    for content in contents:
        yield from reads_of(content, sources)


def _bytes_of_row(source: str, transposed: bool, sources: Mapping[str, StoredTensor]) -> int:
    spec = sources[source].spec
    return spec.shape[0] * spec.dtype.size if transposed else spec.row_bytes
