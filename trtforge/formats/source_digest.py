"""Digests of safetensors files, computed tensor by tensor while conversion reads them, so no byte is read twice.

A file's digest is the BLAKE3 of its header followed by the BLAKE3 of each tensor, in the order of their data. It does
not depend on the order in which tensors were read. In it, a matrix with block scales counts as two tensors, as do
experts in MXFP4; all slices of a stack count as one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from trtforge.formats.shards import RowReader, StoredTensor, raw_header

_SLAB_BYTES = 8 << 20


@dataclass
class _Progress:
    done: int = 0
    hasher: Any = field(default_factory=blake3)


def stored_parts(tensors: Mapping[str, StoredTensor]) -> list[StoredTensor]:
    """The distinct stored tensors of the files."""
    return list(dict.fromkeys(part for tensor in tensors.values() for part in tensor.parts))


class SourceDigests:
    """Digests of a checkpoint's tensors, from the bytes read so far. Not thread-safe."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors
        self._files: dict[Path, list[StoredTensor]] = {}
        for tensor in sorted(stored_parts(tensors), key=lambda tensor: (tensor.offset, tensor.spec.name)):
            self._files.setdefault(tensor.file, []).append(tensor)
        self._progress: dict[str, _Progress] = {}
        self._known: dict[str, bytes] = {}

    def saw(self, tensor: StoredTensor, first: int, data: memoryview) -> None:
        """Hash `data`, the bytes of `tensor` from byte `first` on, if they continue the bytes hashed before."""
        name = tensor.spec.name
        if name in self._known:
            return
        progress = self._progress.setdefault(name, _Progress())
        if first <= progress.done < first + len(data):
            progress.hasher.update(data[progress.done - first :])
            progress.done = first + len(data)
        if progress.done == tensor.spec.nbytes:
            self._known[name] = self._progress.pop(name).hasher.digest()

    def of_tensor(self, name: str) -> bytes:
        """The digest of a tensor. Bytes not hashed yet are read now."""
        parts = [self._of_stored(part) for part in self._tensors[name].parts]
        return parts[0] if len(parts) == 1 else blake3(b"".join(parts)).digest()

    def _of_stored(self, tensor: StoredTensor) -> bytes:
        name = tensor.spec.name
        if name not in self._known:
            slab = memoryview(bytearray(min(_SLAB_BYTES, tensor.spec.nbytes)))
            with RowReader(self.saw) as reader:
                while name not in self._known:
                    done = self._progress[name].done if name in self._progress else 0
                    reader.read_bytes(tensor, done, slab[: tensor.spec.nbytes - done])
        return self._known[name]

    def of_file(self, path: Path) -> str:
        """The digest of a file, in hex. Bytes not hashed yet are read now."""
        hasher = blake3(raw_header(path))
        for tensor in self._files.get(path, ()):
            hasher.update(self._of_stored(tensor))
        return hasher.hexdigest()
