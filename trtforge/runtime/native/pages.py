"""CPU memory in large pages, for what kernels read sequentially: packed weights and KV caches.

A processor caches the addresses of some thousand pages (TLB). A miss makes kernels wait, in a virtual machine twice:
with pages of 2 MiB instead of 4 KiB, steps take a tenth less. A system without large pages gives small ones.
"""

import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_REGION = 64 << 20
"""Bytes that small tensors share: each on its own would have few whole large pages, or waste a part of its last."""
_LINE = 64


def own_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in memory of their own. The operating system makes each page at its first use; none is written here."""
    return torch.frombuffer(_mapped(math.prod(shape) * dtype.itemsize), dtype=dtype).view(tuple(shape))


def shared_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `own_pages`, in a region shared with other tensors, which is freed with the last of them."""
    count = math.prod(shape)
    pages, offset = _SHARED.take(count * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def _mapped(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without large pages, or not Linux
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class _Shared:
    """Regions of memory, handed out piece by piece. A region lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """A region, and the offset of `size` bytes in it for the caller alone."""
        if size > _REGION // 2:
            return _mapped(size), 0
        with self._lock:
            pages = None if self._last is None else self._last()
            if pages is None or self._used + size > _REGION:
                pages, self._used = _mapped(_REGION), 0
                self._last = weakref.ref(pages)
            offset = self._used
            self._used += -(-size // _LINE) * _LINE
            return pages, offset


_SHARED = _Shared()
