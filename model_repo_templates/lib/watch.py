"""A thread that notices clients that went away, and a server that did."""

import os
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Watched(Protocol):
    """A request that may be cancelled."""

    @property
    def done(self) -> bool:
        """Whether it is over."""

    def cancelled(self) -> bool:
        """Whether its client gave up."""


T = TypeVar("T", bound=Watched)


class Watcher(Generic[T]):
    """Calls `on_cancel` for every watched request whose client gave up, again each period until it is over.

    A model process that lost its server cannot answer anybody: it ends at once, engine and all.
    """

    def __init__(self, period_ms: int, on_cancel: Callable[[T], None]) -> None:
        self._period = period_ms / 1000
        self._on_cancel = on_cancel
        self._watched: dict[int, T] = {}
        self._lock = threading.Lock()
        self._server = os.getppid()
        threading.Thread(target=self._run, name="watcher", daemon=True).start()

    def add(self, request: T) -> None:
        """Watch a request until it is over."""
        with self._lock:
            self._watched[id(request)] = request

    def _run(self) -> None:
        while True:
            time.sleep(self._period)
            if os.getppid() != self._server:
                os._exit(1)
            with self._lock:
                self._watched = {key: request for key, request in self._watched.items() if not request.done}
                requests = list(self._watched.values())
            for request in requests:
                if request.cancelled():
                    self._on_cancel(request)
