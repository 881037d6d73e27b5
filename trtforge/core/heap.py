"""Freed memory back to the system: glibc keeps it, and big tensors of many sizes then leave holes that add up."""

import ctypes
from functools import cache


def trim() -> None:
    """Give back what is free, where the C library can."""
    function = _malloc_trim()
    if function is not None:
        function(0)


@cache
def _malloc_trim() -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
