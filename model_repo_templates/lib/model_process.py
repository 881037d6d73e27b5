"""What every Python model's process does at its start and its end."""

import faulthandler
import os
import signal
import sys

_SWITCH_INTERVAL = 0.0005  # seconds that a thread of Python may keep the others waiting


def set_up() -> None:
    """SIGUSR2 writes the stacks of all threads into the server's log, whatever they wait for."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    sys.setswitchinterval(_SWITCH_INTERVAL)


def leave() -> None:
    """End the process from `finalize`, after its threads have ended.

    Triton has its answer by then and only waits for the process. What would follow in the stub (the interpreter's end
    beside its own threads) ends with a segmentation fault now and then (Triton 24.10, pb_stub.cc).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
