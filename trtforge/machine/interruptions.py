"""Signals that raise an exception, delayed while a module loads, because many modules replace it by another error.

ml_dtypes even ends the process without clean-up if SystemExit is raised while it imports numpy.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import NoReturn

from trtforge.machine.processes import handled

_IMPORTLIB = "<frozen importlib._bootstrap>"


def is_loading(frame: FrameType | None) -> bool:
    """Whether `frame` or one of its callers imports a module."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTLIB:
            return True
        frame = frame.f_back
    return False


class AfterImports:
    """Calls `act`, which raises, at once or when the outermost import returns. Main thread only."""

    def __init__(self, act: Callable[[], NoReturn]) -> None:
        self._act = act
        self.waits = False

    def act(self, frame: FrameType | None) -> None:
        """Call `act` now, or after the import in which `frame` is."""
        if not is_loading(frame):
            self._end()
        self.waits = True
        sys.setprofile(self._returned)

    def _returned(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "return" and frame.f_code.co_filename == _IMPORTLIB and not is_loading(frame.f_back):
            self._end()

    def _end(self) -> NoReturn:
        if self.waits:
            sys.setprofile(None)
        self.waits = False
        self._act()


def leave_lost_terminal() -> None:
    """Redirect standard output and error to /dev/null if their terminal is gone, as failing messages would end the
    clean-up."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


def heeded(numbers: Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    """The signals that were not ignored when this process started, as `nohup` ignores SIGHUP."""
    return tuple(number for number in numbers if signal.getsignal(number) != signal.SIG_IGN)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit(128 + number) within the block (after a running import), so that
    clean-up runs.

    A second SIGTERM ends the process at once, but a second SIGHUP does not, as a closed terminal's shell and the kernel
    both send one. No effect outside the main thread and on ignored signals.
    """
    ours = os.getpid()
    numbers = heeded((signal.SIGTERM, signal.SIGHUP))

    def end(number: int, frame: FrameType | None) -> None:
        forked = os.getpid() != ours  # a forked child must not clean up
        for each in numbers:
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP and not forked else signal.SIG_DFL)
        if forked:
            os.kill(os.getpid(), number)
        if number == signal.SIGHUP:
            leave_lost_terminal()
        AfterImports(partial(sys.exit, 128 + number)).act(frame)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handled(numbers, end):
        yield
