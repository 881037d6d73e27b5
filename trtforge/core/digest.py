"""BLAKE3 digests of files; at several GB/s, every artifact can be checked when it is used."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from trtforge.core.reading import naming

_SLAB_BYTES = 8 << 20


class DigestThread:
    """Hashes bytes on a separate thread, in the order of calls, while they are written."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trtforge-digest")
        self._pending: deque[Future[object]] = deque()

    def update(self, hasher: blake3, data: memoryview) -> None:
        """Add `data`, which must not change before `wait` returns."""
        self._pending.append(self._thread.submit(hasher.update, data))

    def wait(self) -> None:
        """Return when everything is hashed. Raises the exceptions of the thread."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


def file_digest(path: Path) -> str:
    """Hex BLAKE3 of a file, read in slabs: a memory map would count as used memory, and crash if the file is truncated.

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
