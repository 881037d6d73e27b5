"""SIGTERM and SIGINT: asked to stop, asked again."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from trtforge.machine.processes import handled

_POLL = 0.1


class StopRequest:
    """The signals that came. `at_once` is called, in the handler, for each signal that must not wait for anybody."""

    def __init__(self) -> None:
        self._signals: list[int] = []
        self._at_once: Callable[[], None] | None = None
        self._draining_allowed = False

    @property
    def asked(self) -> bool:
        """Whether to stop."""
        return bool(self._signals)

    @property
    def again(self) -> int | None:
        """The second signal's number: end at once. None until it comes."""
        return self._signals[1] if len(self._signals) > 1 else None

    def wait(self, seconds: float) -> bool:
        """Wait; True as soon as asked to stop."""
        until = time.monotonic() + seconds
        while not self.asked and time.monotonic() < until:
            time.sleep(min(_POLL, max(0.0, until - time.monotonic())))
        return self.asked

    def kills(self, at_once: Callable[[], None] | None) -> None:
        """Call `at_once` for every signal from now on, the first one too: nothing is served yet."""
        self._at_once, self._draining_allowed = at_once, False

    def allow_draining(self) -> None:
        """The first signal only asks from now on."""
        self._draining_allowed = True

    def note(self, number: int) -> None:
        """A signal came."""
        self._signals.append(number)
        if self._at_once is not None and (len(self._signals) > 1 or not self._draining_allowed):
            self._at_once()


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Takes SIGTERM and SIGINT while this lasts."""
    stop = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.note(number)

    with handled((signal.SIGTERM, signal.SIGINT), handle):
        yield stop
