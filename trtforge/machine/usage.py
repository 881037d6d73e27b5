"""Wall time and peak resident memory of a piece of work in this process."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


@dataclass
class Usage:
    """Filled in when the work ends. `peak_memory` in bytes; 0 if unknown."""

    seconds: float = 0.0
    peak_memory: int = 0


@contextmanager
def measured() -> Iterator[Usage]:
    """Measure the block. The peak is that of the block alone if the kernel allows resetting the high-water mark."""
    _reset_peak()
    usage, start = Usage(), time.perf_counter()
    try:
        yield usage
    finally:
        usage.seconds = time.perf_counter() - start
        usage.peak_memory = peak_memory()


def _reset_peak() -> None:
    try:
        _RESET.write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes; 0 if unknown.

    Prefers VmHWM: on Linux getrusage's peak includes the parent's memory at the fork.
    """
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return _peak_of_rusage()
    found = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
    return _peak_of_rusage() if found is None else found


def _peak_of_rusage() -> int:
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
