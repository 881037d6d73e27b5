"""Safetensors files without torch and numpy: headers, reading by rows, writing in order.

Format: 8 bytes little-endian header length, a JSON header with dtype, shape and byte range of each tensor, the data.
"""

import json
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

from blake3 import blake3

from trtforge.core.digest import DigestThread
from trtforge.core.dtypes import Dtype, dtype_in_file
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json
from trtforge.core.manifest import FileRecord
from trtforge.core.reading import CHECK_DISK, disk_fails, naming, opened

_LARGEST_HEADER = 100_000_000  # bytes; limit of the safetensors library
_LARGEST_NUMBER = 1 << 63
_MOST_DIMENSIONS = 8
# Longer writes allocate page cache in blocks of megabytes, which a virtual machine may first have to get back from its
# host: for 4 GB that took ten times as long as the copy.
_WRITE_BYTES = 128 << 10
_STARTED_BYTES = 2 << 20  # bytes after which the system is told to write them: larger bursts wait for the disk
_DEQUANTIZED_BYTES = 2 << 20  # of bfloat16 rows dequantised at once
_TRUNCATED = "The download or copy did not finish: fetch the file again."


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return prod(self.shape) * self.dtype.size

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return prod(self.shape[1:]) * self.dtype.size


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `offset` is its first byte, counted from the start of the file."""

    spec: TensorSpec
    file: Path
    offset: int

    @property
    def parts(self) -> tuple["StoredTensor", ...]:
        """The stored tensors from which its values are read."""
        return (self,)


@dataclass(frozen=True)
class BlockScaled(StoredTensor):
    """An E4M3 matrix with a scale for each `block` (rows, columns), read as a dequantised bfloat16 matrix.

    `spec`: of that matrix; `offset`: of the codes.
    """

    codes: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Codes and scales."""
        return (self.codes, self.scales)


@dataclass(frozen=True)
class Mxfp4Experts(StoredTensor):
    """Matrices of experts in MXFP4, read as dequantised bfloat16 matrices (experts, in, out).

    `spec`: of these matrices; `offset`: of the codes (experts, out, in / 32, 16); `scales` are (experts, out, in / 32).
    """

    codes: StoredTensor
    scales: StoredTensor

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Codes and scales."""
        return (self.codes, self.scales)


@dataclass(frozen=True)
class Slice(StoredTensor):
    """One index of the first dimension of `whole`, or some of its rows."""

    whole: StoredTensor

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The parts of the whole tensor."""
        return self.whole.parts


def raw_header(path: Path) -> bytes:
    """Everything before the data of a file: the header's length and text.

    Raises ForgeError naming the file if it is missing, truncated or not a safetensors file.
    """
    try:
        with os.fdopen(opened(path), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ForgeError(f"{path}: not a regular file", hint="Check the path.")
            start = file.read(8)
            length = int.from_bytes(start, "little")
            text = file.read(length) if length <= _LARGEST_HEADER else b""
    except OSError as error:
        remedy = CHECK_DISK if disk_fails(error) else "Check the path and its permissions."
        raise ForgeError(f"{path}: {error.strerror}", hint=remedy) from None
    if len(start) < 8 or length > _LARGEST_HEADER:
        raise ForgeError(f"{path} is not a safetensors file", hint="Only safetensors checkpoints are read.")
    if len(text) < length:
        raise ForgeError(f"{path} is truncated inside its header", hint=_TRUNCATED)
    return start + text


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of a file, in the order of their data.

    Raises ForgeError naming the file (and tensor) if it is missing, truncated or not a safetensors file.
    """
    header = raw_header(path)
    entries = parse_json(header[8:], f"{path}: its header is damaged", hint=_TRUNCATED)
    if not isinstance(entries, dict):
        raise ForgeError(f"{path}: its header is damaged: not a JSON object", hint=_TRUNCATED)
    entries.pop("__metadata__", None)
    tensors = [_stored(path, name, entry, len(header)) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.spec.name))
    size = path.stat().st_size
    expected = max((tensor.offset + tensor.spec.nbytes for tensor in tensors), default=len(header))
    if size < expected:
        raise ForgeError(f"{path} is truncated: {size} bytes, its header describes {expected}", hint=_TRUNCATED)
    if size > expected:
        raise ForgeError(f"{path} is damaged: {size} bytes, its header describes {expected}", hint=_TRUNCATED)
    _require_contiguous(path, tensors, len(header))
    return tuple(tensors)


def _stored(path: Path, name: str, entry: object, base: int) -> StoredTensor:
    where = f"{path}: its header is damaged: {name}"
    if not isinstance(entry, dict):
        raise ForgeError(f"{where}: not a JSON object", hint=_TRUNCATED)
    code = entry.get("dtype")
    if not isinstance(code, str):
        raise ForgeError(f"{where}: its dtype is {code!r}, not a string", hint=_TRUNCATED)
    shape, offsets = _numbers(entry, "shape", where), _numbers(entry, "data_offsets", where)
    spec = TensorSpec(name, dtype_in_file(code, f"{path}: {name}"), shape)
    if len(offsets) != 2 or offsets[1] - offsets[0] != spec.nbytes:
        raise ForgeError(f"{path}: {name}: its byte range does not fit its shape", hint=_TRUNCATED)
    return StoredTensor(spec, path, base + offsets[0])


def _numbers(entry: dict[str, object], key: str, where: str) -> tuple[int, ...]:
    """A list of at most `_MOST_DIMENSIONS` integers in [0, 2^63)."""
    values = entry.get(key)
    if not isinstance(values, list) or len(values) > _MOST_DIMENSIONS:
        raise ForgeError(
            f"{where}: its {key} is {values!r:.60}, not a list of at most {_MOST_DIMENSIONS} numbers", hint=_TRUNCATED
        )
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST_NUMBER:
            raise ForgeError(f"{where}: {value!r:.60} in its {key} is not a non-negative integer", hint=_TRUNCATED)
    return tuple(values)


def _require_contiguous(path: Path, tensors: Sequence[StoredTensor], start: int) -> None:
    """Raises ForgeError for tensors that overlap, and for gaps between them."""
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.spec.nbytes)):
        if tensor.offset != start:
            said = "overlaps the one before it" if tensor.offset < start else "leaves a gap before it"
            raise ForgeError(f"{path}: its header is damaged: {tensor.spec.name} {said}", hint=_TRUNCATED)
        start += tensor.spec.nbytes


Seen = Callable[[StoredTensor, int, memoryview], None]
"""Called after every read with the tensor, the offset of the first byte in it, and the bytes."""


class RowReader:
    """Reads rows of stored tensors into a buffer, so that no page of the file stays mapped.

    Raises ForgeError naming a file that cannot be read or has become shorter.
    """

    def __init__(self, seen: Seen | None = None) -> None:
        self._descriptors: dict[Path, int] = {}
        self._seen = seen

    def read(self, tensor: StoredTensor, start: int, stop: int, into: memoryview) -> memoryview:
        """Rows [start, stop) of `tensor` in the first bytes of `into`."""
        row = tensor.spec.row_bytes
        return self.read_bytes(tensor, start * row, into[: (stop - start) * row])

    def read_columns(self, tensor: StoredTensor, start: int, stop: int, into: memoryview) -> memoryview:
        """Columns [start, stop) of a matrix, row after row, in the first bytes of `into`."""
        (rows, columns), size = tensor.spec.shape, tensor.spec.dtype.size
        if stop - start == columns:
            return self.read(tensor, 0, rows, into)
        if isinstance(tensor, Slice) and isinstance(tensor.whole, Mxfp4Experts):
            expert = (tensor.offset - tensor.whole.offset) // tensor.spec.nbytes
            data = self._expert(tensor.whole, expert, range(start, stop))
            into[: len(data)] = data
            return into[: len(data)]
        width = (stop - start) * size
        for row in range(rows):
            first = row * tensor.spec.row_bytes + start * size
            self.read_bytes(tensor, first, into[row * width : (row + 1) * width])
        return into[: rows * width]

    def read_bytes(self, tensor: StoredTensor, first: int, into: memoryview) -> memoryview:
        """Read bytes of `tensor`, from byte `first` of its data on, into `into`; returns the part that was filled."""
        if isinstance(tensor, BlockScaled):
            return self._dequantized(tensor, first, into)
        if isinstance(tensor, Mxfp4Experts):
            return self._experts(tensor, first, into)
        if isinstance(tensor, Slice):
            return self.read_bytes(tensor.whole, tensor.offset - tensor.whole.offset + first, into)
        try:
            descriptor = self._descriptor(tensor.file)
            done = 0
            while done < len(into):
                count = os.preadv(descriptor, [into[done:]], tensor.offset + first + done)
                if count == 0:
                    raise ForgeError(
                        f"{tensor.file} became shorter while it was read ({tensor.spec.name})",
                        hint="Let nothing else write the source, then run again.",
                    )
                done += count
        except OSError as error:
            raise ForgeError(
                f"{tensor.file}: {error.strerror} ({tensor.spec.name})",
                hint="Check its permissions and the disk or network share that it is on.",
            ) from error
        if self._seen is not None:
            self._seen(tensor, first, into)
        return into

    def _dequantized(self, tensor: BlockScaled, first: int, into: memoryview) -> memoryview:
        """Like `read_bytes`, by slabs of rows."""
        from trtforge.formats.block_scales import dequantize

        width, high = tensor.spec.row_bytes, tensor.block[0]
        step, last = max(1, _DEQUANTIZED_BYTES // width), first + len(into)
        for row in range(first // width, -(-last // width), step):
            stop = min(row + step, -(-last // width))
            rows, blocks = range(row, stop), range(row // high, -(-stop // high))
            codes, scales = self._rows(tensor.codes, rows), self._rows(tensor.scales, blocks)
            data = dequantize(codes, scales, rows, tensor.spec.shape[1], tensor.scales.spec.dtype.name, tensor.block)
            begin, end = max(first, row * width), min(last, stop * width)
            into[begin - first : end - first] = data[begin - row * width : end - row * width]
        return into

    def _experts(self, tensor: Mxfp4Experts, first: int, into: memoryview) -> memoryview:
        """Like `read_bytes`, by experts."""
        size, last = tensor.spec.row_bytes, first + len(into)
        for expert in range(first // size, -(-last // size)):
            data = self._expert(tensor, expert, range(tensor.spec.shape[2]))
            begin, end = max(first, expert * size), min(last, (expert + 1) * size)
            into[begin - first : end - first] = data[begin - expert * size : end - expert * size]
        return into

    def _expert(self, tensor: Mxfp4Experts, expert: int, outputs: range) -> memoryview:
        """The columns `outputs` of an expert's matrix (in, out), row after row."""
        from trtforge.formats.mxfp4 import dequantize

        def part(stored: StoredTensor) -> memoryview:
            one = prod(stored.spec.shape[2:])
            data = memoryview(bytearray(len(outputs) * one))
            return self.read_bytes(stored, expert * stored.spec.row_bytes + outputs.start * one, data)

        return dequantize(part(tensor.codes), part(tensor.scales), len(outputs))

    def _rows(self, tensor: StoredTensor, rows: range) -> memoryview:
        return self.read(tensor, rows.start, rows.stop, memoryview(bytearray(len(rows) * tensor.spec.row_bytes)))

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> "RowReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Writer:
    """Writes one safetensors file sequentially and computes its digest while writing.

    `digests`: the hashing thread; written buffers must not change before its `wait` returns.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorSpec], digests: DigestThread | None = None) -> None:
        self.path = path
        self._pending = list(reversed(tensors))
        self._left = 0
        self._hasher, self._digests = blake3(), digests
        self._written = self._started = 0
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._emit(memoryview(header_of(tensors)))

    def begin(self, name: str) -> None:
        """Start tensor `name`, which must be the next one of the header."""
        assert self._left == 0, f"{self._left} bytes are missing before {name}"
        spec = self._pending.pop()
        assert spec.name == name, f"{name} was written where {spec.name} was announced"
        self._left = spec.nbytes

    def write(self, data: memoryview | bytes) -> None:
        """Write the next bytes of the current tensor. Raises OSError naming the file."""
        view = memoryview(data)
        assert view.nbytes <= self._left, f"{view.nbytes} bytes, {self._left} were left"
        self._left -= view.nbytes
        if view.nbytes:
            self._emit(view.cast("B"))

    def _emit(self, view: memoryview) -> None:
        assert self._descriptor is not None, f"{self.path} is closed"
        if self._digests is None:
            self._hasher.update(view)
        else:
            self._digests.update(self._hasher, view)
        self._written += len(view)
        try:
            while len(view):
                view = view[os.write(self._descriptor, view[:_WRITE_BYTES]) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if self._written - self._started >= _STARTED_BYTES:
            _start_writing(self._descriptor, self._started, self._written - self._started)
            self._started = self._written

    def finish(self) -> FileRecord:
        """Close the complete file and return its record for the manifest."""
        assert self._left == 0, f"{self._left} bytes are missing at the end"
        assert not self._pending, f"never written: {[spec.name for spec in self._pending]}"
        self.close()
        if self._digests is not None:
            self._digests.wait()
        return FileRecord(bytes=self._written, blake3=self._hasher.hexdigest())

    def close(self) -> None:
        """Close the file, complete or not. Raises OSError naming it: NFS reports a full disk here."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with naming(self.path):
                os.close(descriptor)


def _start_writing(descriptor: int, first: int, count: int) -> None:
    """Make the system start writing `count` bytes of a file, from `first`, to the disk, without waiting.

    For POSIX_FADV_DONTNEED, Linux starts to write dirty pages and keeps them until they are written.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a hint, which some file systems do not support
            os.posix_fadvise(descriptor, first, count, os.POSIX_FADV_DONTNEED)


def header_of(tensors: Iterable[TensorSpec]) -> bytes:
    """Everything before the data of these tensors in a file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in tensors:
        end = offset + spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype.safetensors, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
