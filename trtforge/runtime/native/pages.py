"""CPU memory in large pages, for data that kernels read sequentially: packed weights and KV caches.

A processor's TLB caches the addresses of a few thousand pages. Kernels wait for each miss, twice in a virtual machine.
With pages of 2 MiB instead of 4 KiB, steps take 10 % less time. A system without large pages uses small ones.
"""

import itertools
import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_REGION = 64 << 20
"""Bytes of a region that small tensors share: alone, each would have few whole large pages or waste part of its last.
"""
_LINE = 64
_LARGE_PAGE, _SMALL_PAGE = 2 << 20, 4096
_SPREAD_FROM = 16 * _LARGE_PAGE
"""Bytes of a tensor from which on its start within a large page varies, at the cost of one more page."""
_TENSOR_NUMBERS, _GOLDEN_RATIO = itertools.count(), 0.6180339887
"""Any successive numbers times this ratio have fractions that are evenly spread between 0 and 1."""


def own_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A zero tensor in separate memory. No page is written here; the operating system allocates each on first use.

    Large tensors that are used from their starts on, as KV caches are, reach their next large page at different times:
    in a virtual machine, to allocate a page may take as long as half a step.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < _SPREAD_FROM:
        return torch.frombuffer(_mapped(size), dtype=dtype).view(tuple(shape))
    pages = _mapped(size + _LARGE_PAGE)
    start = next(_TENSOR_NUMBERS) * _GOLDEN_RATIO % 1 * _LARGE_PAGE // _SMALL_PAGE * _SMALL_PAGE
    offset = (int(start) - torch.frombuffer(pages, dtype=torch.uint8).data_ptr()) % _LARGE_PAGE
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def shared_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Like `own_pages`, but in a region shared with other tensors, which is freed with the last of them."""
    count = math.prod(shape)
    pages, offset = _SHARED.take(count * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def _mapped(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without large pages, or not Linux
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class _Shared:
    """Allocates pieces of large memory regions. A region lives as long as any tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """Allocate `size` bytes; returns the region and their offset in it."""
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
