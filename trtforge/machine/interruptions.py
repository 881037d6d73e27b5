"""Signals that raise an exception: while a module loads they wait, because many modules turn it into another error.

ml_dtypes even ends the process, without any clean-up, if SystemExit is raised in the numpy that it imports.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import NoReturn

from trtforge.machine.processes import SIGTERM_STATUS, handled

_IMPORTLIB = "<frozen importlib._bootstrap>"


def is_loading(frame: FrameType | None) -> bool:
    """Whether `frame` or one of its callers imports a module."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTLIB:
            return True
        frame = frame.f_back
    return False


class AfterImports:
    """Calls `act`, which raises: at once, or where the outermost import returns. Main thread only."""

    def __init__(self, act: Callable[[], NoReturn]) -> None:
        self._act = act
        self.waits = False

    def act(self, frame: FrameType | None) -> None:
        """Call `act` now, or after the import that `frame` belongs to."""
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


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit(SIGTERM_STATUS) within the block, after an import that runs, so that clean-up runs.

    A second SIGTERM ends the process at once. No effect outside the main thread, or if SIGTERM is ignored.
    """
    ours, ending = os.getpid(), AfterImports(partial(sys.exit, SIGTERM_STATUS))

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != ours:  # a forked child has nothing to clean up
            os.kill(os.getpid(), signal.SIGTERM)
        ending.act(frame)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        yield
        return
    with handled((signal.SIGTERM,), end):
        yield
