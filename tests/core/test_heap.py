"""Memory that goes back to the system as soon as it is freed."""

import subprocess
import sys

PROGRAM = """
import ctypes, sys
from pathlib import Path
from trtforge.core.heap import return_large_blocks

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def allocate(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block

def resident():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10

if sys.argv[1] == "yes":
    return_large_blocks()
libc.free(allocate(30 << 20))  # glibc keeps blocks up to this size from now on
before = resident()
blocks = [allocate(1 << 20) for _ in range(20)]
above = allocate(1 << 20)  # still in use, so that the end of the heap cannot be given back
for block in blocks:
    libc.free(block)
print(resident() - before)
"""


def kept(returns: str) -> int:
    """Bytes that stay resident after 20 of 21 blocks of 1 MiB are freed, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, returns], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_large_blocks_go_back_to_the_system_when_they_are_freed() -> None:
    assert kept("no") > 20 << 20
    assert kept("yes") < 4 << 20
