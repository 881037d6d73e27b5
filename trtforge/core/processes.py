"""Child processes that never outlive us, with all that they start: signals, Linux's sessions and /proc."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
SIGINT_STATUS, SIGTERM_STATUS = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit statuses of a program that a signal ended, as shells give them."""


def end_with_parent() -> None:
    """To run in a child before its program: SIGTERM when the parent ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def handled(numbers: Iterable[int], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """These signals call `handle` while this lasts. For the main thread: it alone may say so, and gets signals."""
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit(SIGTERM_STATUS) while this lasts, so that what was begun is cleared away.

    A second one ends the process at once. Nothing changes outside the main thread, and where SIGTERM is ignored.
    """
    ours = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != ours:  # a fork of ours has nothing to clear away
            os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(SIGTERM_STATUS)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        yield
        return
    with handled((signal.SIGTERM,), end):
        yield


def session_processes(session: int) -> dict[int, str]:
    """Process id to program name of everything that lives in a session (its leader and all that it started)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and lives_in(session, int(entry.name)):
            with suppress(OSError):
                program = (entry / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
                found[int(entry.name)] = Path(program).name
    return found


def lives_in(session: int, process: int) -> bool:
    """Whether a process is there, has not ended and belongs to the session."""
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return after_name[0] not in "ZX" and int(after_name[3]) == session


def end_session(session: int, patience: float = 5.0) -> None:
    """Kill what is left of a session and wait until it is gone."""
    until = time.monotonic() + patience
    while (left := session_processes(session)) and time.monotonic() < until:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
