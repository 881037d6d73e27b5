"""What every Python model's process does at its start and its end."""

import faulthandler
import os
import select
import signal
import sys
import threading
import time

_POLL = 0.05  # seconds, where the kernel has no pidfd
_SWITCH_INTERVAL = 0.0005  # seconds that a thread of Python may keep the others waiting


def set_up() -> None:
    """SIGUSR2 writes the stacks of all threads into the server's log, whatever they wait for.

    A model process that lost its server ends at once: it cannot answer anybody.
    """
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    threading.Thread(target=_end_with, args=(os.getppid(),), name="server-watch", daemon=True).start()


def leave() -> None:
    """End the process from `finalize`, after its threads have ended.

    Triton has its answer by then and only waits for the process. What would follow in the stub (the interpreter's end
    beside its own threads) ends with a segmentation fault now and then (Triton 24.10, pb_stub.cc).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with(server: int) -> None:
    """Wait for the end of the process `server`, our parent, then end this one."""
    try:
        poll = select.poll()
        poll.register(os.pidfd_open(server), select.POLLIN)
        poll.poll()
    except OSError:
        while os.getppid() == server:
            time.sleep(_POLL)
    os._exit(1)
