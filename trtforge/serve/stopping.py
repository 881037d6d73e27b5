"""SIGTERM, SIGINT and SIGHUP: the first requests a stop, the second (except SIGHUP) an immediate stop."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from trtforge.machine.interruptions import heeded, leave_lost_terminal
from trtforge.machine.processes import handled

_POLL = 0.1


class StopRequest:
    """The signals received. `at_once` is called in the signal handler for each signal that must act immediately."""

    def __init__(self) -> None:
        self._signals: list[int] = []
        self._at_once: Callable[[], None] | None = None
        self._draining_allowed = False

    @property
    def asked(self) -> bool:
        """Whether a stop is requested."""
        return bool(self._signals)

    @property
    def again(self) -> int | None:
        """Number of the second signal, which requests an immediate end; None until it arrives."""
        return self._signals[1] if len(self._signals) > 1 else None

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; True as soon as a stop is requested."""
        until = time.monotonic() + seconds
        while not self.asked and time.monotonic() < until:
            time.sleep(min(_POLL, max(0.0, until - time.monotonic())))
        return self.asked

    def kills(self, at_once: Callable[[], None] | None) -> None:
        """From now on, call `at_once` for each signal including the first, because nothing is served yet."""
        self._at_once, self._draining_allowed = at_once, False

    def allow_draining(self) -> None:
        """From now on, do not call `at_once` for the first signal."""
        self._draining_allowed = True

    def note(self, number: int) -> None:
        """Record a signal; SIGHUP only as the first, because the shell of a closed terminal and the kernel both send
        one."""
        if number == signal.SIGHUP:
            leave_lost_terminal()
            if self.asked:
                return
        self._signals.append(number)
        if self._at_once is not None and (len(self._signals) > 1 or not self._draining_allowed):
            self._at_once()


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Handles SIGTERM, SIGINT and, unless it is ignored, SIGHUP inside the context."""
    stop = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.note(number)

    with handled((signal.SIGTERM, signal.SIGINT, *heeded((signal.SIGHUP,))), handle):
        yield stop
