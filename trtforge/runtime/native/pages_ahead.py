"""Allocates the memory pages of KV blocks in the background, before steps write to them.

The operating system allocates a page when it is first written. In a virtual machine that has not used the memory
before, a large page takes about 5 ms (72 ms for 32 MiB, measured with Linux 6.18), and a step may reach the next page
of several layers.
"""

import ctypes
import functools
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14 and later (include/uapi/asm-generic/mman-common.h)
_BYTES = 4 << 20  # per layer: minimum to allocate ahead of the blocks in use
_AT_ONCE = 2 << 20
_SMALL_PAGE = 4096
_NICE = 10  # steps have priority when they need the same processor
_PAUSES = 4  # pause time / allocation time: no step is delayed by more than one or two pages


class PagesAhead:
    """Allocates the pages of `tensors`, the layers' KV caches (blocks, ...) in CPU memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [each for each in tensors if each.nbytes]  # linear attention caches no tokens
        self._blocks = min((len(each) for each in self._tensors), default=0)
        self._least = max((-(-_BYTES // each[0].nbytes) for each in self._tensors), default=0)
        """Minimum number of blocks to allocate ahead."""
        self._made: int | None = None
        """Number of first blocks whose pages are allocated or being allocated; None before the first step."""

    def reach(self, blocks: int, rows: int) -> threading.Thread | None:
        """Allocate on a thread the pages of blocks below `blocks`, which a step of `rows` rows uses, and some more.

        The first call allocates none, so that an engine's first token does not wait. Returns the thread, if one starts.
        """
        if self._made is None:
            self._made = 0
            return None
        ahead = max(self._least, 2 * rows)
        if min(blocks + ahead // 2, self._blocks) <= self._made:
            return None
        first, self._made = self._made, min(blocks + ahead, self._blocks)
        places = [_addresses(tensor, first, self._made) for tensor in self._tensors]
        thread = threading.Thread(target=_make, args=(places, self._tensors), name="pages", daemon=True)
        with suppress(RuntimeError):  # at exit, or with too many threads: then steps allocate pages as they write
            thread.start()
            return thread
        return None


def _addresses(tensor: Tensor, first: int, end: int) -> range:
    """The addresses of the bytes of blocks [first, end)."""
    size = tensor[0].nbytes
    return range(tensor.data_ptr() + first * size, tensor.data_ptr() + end * size)


def _make(places: Sequence[range], _kept: Sequence[Tensor]) -> None:
    """Allocate the pages of these bytes; `_kept` keeps their tensors alive.

    Does not call torch: a thread that returns from its C++ code while the interpreter exits aborts the process.
    """
    with suppress(OSError, AttributeError):  # only Linux has a priority per thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    madvise = _madvise()
    if madvise is None:
        return
    for place in places:
        for at in range(place.start // _SMALL_PAGE * _SMALL_PAGE, place.stop, _AT_ONCE):
            start = time.perf_counter()
            madvise(at, min(_AT_ONCE, place.stop - at), _POPULATE_WRITE)  # unsupported: pages are allocated on use
            time.sleep(_PAUSES * (time.perf_counter() - start))


@functools.cache
def _madvise() -> "ctypes._NamedFuncPointer | None":
    """`madvise` of the C library, or None; unlike mmap.madvise, a call lets other Python threads run."""
    with suppress(OSError, AttributeError):
        function = ctypes.CDLL(None).madvise
        function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        return function
    return None
