"""A thread that detects cancelled requests."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_FEW = 500
_PERIODS_FEW, _PERIODS_MANY = 5, 20  # periods until every request is checked, for up to _FEW requests and for more


class Watched(Protocol):
    """A request that may be cancelled."""

    @property
    def done(self) -> bool:
        """Whether it is over."""

    def cancelled(self) -> bool:
        """Whether its client cancelled it or disconnected."""


T = TypeVar("T", bound=Watched)


class Watcher(Generic[T]):
    """Calls `on_cancel` once for every watched request that was cancelled.

    A check costs a round trip to the server, so each period checks only a share of the requests.
    """

    def __init__(self, period_ms: int, on_cancel: Callable[[T], None]) -> None:
        self._period = period_ms / 1000
        self._on_cancel = on_cancel
        self._watched: deque[T] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def add(self, request: T) -> None:
        """Watch a request until it is over."""
        self._watched.append(request)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._period):
            watched = len(self._watched)
            for _ in range(-(-watched // (_PERIODS_FEW if watched <= _FEW else _PERIODS_MANY))):
                if self._closing.is_set():
                    return
                self._look()

    def _look(self) -> None:
        """Check the next unfinished request; drop finished ones."""
        for _ in range(len(self._watched)):
            request = self._watched.popleft()
            if request.done:
                continue
            if request.cancelled():
                self._on_cancel(request)
            else:
                self._watched.append(request)
            return
