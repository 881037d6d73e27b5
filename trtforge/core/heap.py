"""Return freed memory to the system: glibc keeps it, and freed tensors of many sizes fragment the heap."""

import ctypes
from functools import cache


def trim() -> None:
    """Return free memory, if the C library supports it."""
    function = _malloc_trim()
    if function is not None:
        function(0)


@cache
def _malloc_trim() -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
