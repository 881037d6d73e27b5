"""Stack traces of a wedged server: its model and engine processes write them to its log on SIGUSR2 (faulthandler)."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trtforge.machine.processes import handles_signal

_WRITING = 0.7  # seconds for the processes to write
_LARGEST = 1 << 18  # bytes that are returned


def dump_stacks(processes: Iterable[int], log: Path | None) -> str:
    """Make `processes` write their stacks; returns what they wrote to `log`, empty without a log."""
    start = log.stat().st_size if log is not None and log.exists() else 0
    asked = [process for process in processes if handles_signal(process, signal.SIGUSR2)]
    for process in asked:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR2)
    if not asked:
        return ""
    time.sleep(_WRITING)
    if log is None:
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return file.read(_LARGEST).decode(errors="replace")
