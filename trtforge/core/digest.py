"""BLAKE3 digests of files: fast enough (several GB/s) that every artifact can be checked when it is used."""

from pathlib import Path

from blake3 import blake3

_SLAB_BYTES = 8 << 20


def file_digest(path: Path) -> str:
    """Hex BLAKE3 of a file's bytes, read in slabs: a mapped file would count as memory and die if it were truncated."""
    hasher = blake3(max_threads=blake3.AUTO)
    slab = memoryview(bytearray(min(_SLAB_BYTES, path.stat().st_size + 1)))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(slab):
            hasher.update(slab[:count])
    return hasher.hexdigest()


def text_digest(text: str) -> str:
    """Hex BLAKE3 of a string's UTF-8 bytes."""
    return blake3(text.encode()).hexdigest()
