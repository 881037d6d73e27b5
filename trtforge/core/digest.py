"""BLAKE3 digests of files: at several GB/s, every artifact can be checked on use."""

from pathlib import Path

from blake3 import blake3

from trtforge.core.reading import naming

_SLAB_BYTES = 8 << 20


def file_digest(path: Path) -> str:
    """Hex BLAKE3 of a file, read in slabs: a memory map would count as memory and crash if the file is truncated.

    Raises OSError naming the file.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    slab = memoryview(bytearray(min(_SLAB_BYTES, path.stat().st_size + 1)))
    with naming(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(slab):
            hasher.update(slab[:count])
    return hasher.hexdigest()


def text_digest(text: str) -> str:
    """Hex BLAKE3 of a string's UTF-8 bytes."""
    return blake3(text.encode()).hexdigest()
