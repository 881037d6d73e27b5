"""The CPU kernels as they are compiled for machines with fewer instructions than this one has.

Tests compile two of the levels; with TRTFORGE_TEST_LEVELS=all (`make test-kernels`) all that this machine can run.
"""

import functools
import os

from trtforge.machine.host import Host
from trtforge.machine.processor import read_instruction_sets
from trtforge.runtime.native import bindings
from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.compiler import NATIVE, compiled

_NEEDED = {
    "x86-64": {"sse2"},
    "x86-64-v3": {"avx2", "fma", "f16c", "bmi2"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
"""Levels of the x86-64 psABI: SSE2, AVX2 and AVX-512 without bfloat16 products; what Linux calls their instructions."""

DOTS = "native, bfloat16 by its own instructions"
TILES = "native, tile registers in software"
_HERE = read_instruction_sets(Host())
_ALL = (
    *(level for level, needed in _NEEDED.items() if needed <= _HERE),
    NATIVE,
    *((DOTS,) if "avx512_bf16" in _HERE else ()),
    TILES,
)
"""Those that this machine can run. `NATIVE` is all that it has, with the faster way to multiply bfloat16."""
EVERY = os.environ.get("TRTFORGE_TEST_LEVELS") == "all"
"""Whether tests shall compile all that can be compiled."""
LEVELS = _ALL if EVERY else (NATIVE, TILES)
_DEFINES = {
    DOTS: ("TRTFORGE_DOTS", "TRTFORGE_WITHOUT_AMX"),
    TILES: ("TRTFORGE_EMULATE_AMX", "TRTFORGE_NARROW_VECTORS"),
}

_kernels_of_this_machine = bindings._native


@functools.cache
def kernels_at(level: str) -> Native:
    """The kernels of a level."""
    if level in _DEFINES:
        return Native(compiled(_DEFINES[level]))
    found = _kernels_of_this_machine() if level == NATIVE else Native(compiled(architecture=level))
    assert found is not None, "these machines have a C++ compiler"
    return found
