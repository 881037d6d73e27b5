"""Return freed memory to the system: glibc keeps it, and freed tensors of many sizes fragment the heap."""

import ctypes
import os
from functools import cache

_M_MMAP_THRESHOLD = -3  # mallopt(3)
_LARGE = 256 << 10


def trim() -> None:
    """Return free memory, if the C library supports it."""
    function = _of_libc("malloc_trim")
    if function is not None:
        function(0)


def return_large_blocks() -> None:
    """From now on, blocks of 256 KiB or more go back to the system as soon as they are freed, if the C library can.

    Otherwise glibc raises this threshold to the size of the largest freed block, up to 32 MiB, and peak memory depends
    on the order in which threads free tensors. Allocations take longer, because new pages are cleared.
    """
    function = _of_libc("mallopt")
    if function is not None:
        function(_M_MMAP_THRESHOLD, _LARGE)


def keep_few_operations() -> None:
    """Let oneDNN keep 32 compiled operations of torch instead of 1,024, if it has not computed yet in this process.

    One layer has fewer operations; with AMX each takes up to a megabyte. Source: oneDNN's guide, "Primitive Cache".
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")


@cache
def _of_libc(name: str) -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), name, None)
