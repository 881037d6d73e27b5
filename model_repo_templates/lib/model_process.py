"""Set-up and exit of every Python model's process."""

import faulthandler
import os
import select
import signal
import sys
import threading
import time

_POLL = 0.05  # seconds, where the kernel has no pidfd
_SWITCH_INTERVAL = 0.0005  # seconds after which a Python thread is asked to release the GIL


def set_up() -> None:
    """Let SIGUSR2 write the stacks of all threads to the server's log, and end this process when its server ends."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    threading.Thread(target=_end_with, args=(os.getppid(),), name="server-watch", daemon=True).start()


def leave() -> None:
    """End the process from `finalize`, after its threads have ended.

    By then Triton only waits for the process. The stub's own exit, which finalizes the interpreter beside running
    threads, sometimes crashes with a segmentation fault (Triton 24.10, pb_stub.cc).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with(server: int) -> None:
    """Wait until the parent process `server` ends, then end this process."""
    try:
        poll = select.poll()
        poll.register(os.pidfd_open(server), select.POLLIN)
        poll.poll()
    except OSError:
        while os.getppid() == server:
            time.sleep(_POLL)
    os._exit(1)
