"""Memory for packed weights in pages of 2 MiB, where Linux gives them on request (transparent huge pages).

Every step reads all weights. In pages of 4 KiB it looks up an address for each of them, more than the processor's
buffers hold, and what the processor fetches ahead by itself ends with each page.
"""

import contextlib
import mmap
import threading

import torch
from torch import Tensor

PAGE = 2 << 20
_MAPPED = 16 * PAGE
_ALIGNMENT = 64  # bytes
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class LargePages:
    """Hands out parts of large mappings. A mapping is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapping = mmap.mmap(-1, mmap.PAGESIZE)
        self._next = len(self._mapping)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy with a storage of its own, aligned to a cache line."""
        if tensor.numel() == 0:
            return tensor.contiguous()
        mapping, offset = self._take(tensor.nbytes)
        part = torch.frombuffer(mapping, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        return part.view(tensor.shape).copy_(tensor)

    def _take(self, size: int) -> tuple[mmap.mmap, int]:
        """A mapping, and where `size` bytes of it are."""
        with self._lock:
            if self._next + size > len(self._mapping):
                self._mapping, self._next = _mapped(max(size, _MAPPED))
            offset = self._next
            self._next += -(-size // _ALIGNMENT) * _ALIGNMENT
            return self._mapping, offset


def _mapped(size: int) -> tuple[mmap.mmap, int]:
    """A mapping with room for `size` bytes from the beginning of a large page, and where that is.

    A page takes memory when it is first written to.
    """
    mapping = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _ADVICE is not None:
        with contextlib.suppress(OSError):  # of a kernel without large pages
            mapping.madvise(_ADVICE)
    return mapping, -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % PAGE


WEIGHTS = LargePages()
"""Of the process."""
