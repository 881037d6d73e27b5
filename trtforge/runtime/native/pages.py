"""Memory of the CPU in large pages, for what kernels read from one end to the other: packed weights and KV caches.

A processor keeps the addresses of some thousand pages. Looking up those of others, in a virtual machine twice, makes
kernels wait: with pages of 2 MiB instead of 4 KiB steps take a tenth less. A system that has none gives small ones.
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
"""Bytes of what small tensors share: each by itself would have few whole large pages, or waste a part of its last."""
_LINE = 64


def own_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros; the operating system makes their pages at their first use, so that none is written here."""
    return torch.frombuffer(_mapped(math.prod(shape) * dtype.itemsize), dtype=dtype).view(tuple(shape))


def shared_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `own_pages`, beside other tensors, whose memory is freed when none of them exists any more."""
    count = math.prod(shape)
    pages, offset = _SHARED.take(count * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def _mapped(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without large pages, or not Linux
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class _Shared:
    """Regions of memory, of which the last is given out piece by piece. They live as long as tensors in them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """Memory, and where in it `size` bytes begin that nobody else has."""
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
