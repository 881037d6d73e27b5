"""Draining: unfinished requests may finish until a timeout; the rest are cut with an error."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from trtforge.core.figures import counted
from trtforge.engine_process.control import EngineStatus

_POLL = 0.1
_DELIVERY = 0.5  # seconds for responses in flight to their clients
_TRIES = 3
_STATUS_TIMEOUT = 1.0  # seconds


class Drainable(Protocol):
    """An engine that can be drained: `EngineControl`. Every method raises OSError if the engine does not answer."""

    def status(self, timeout: float = 2.0) -> EngineStatus:
        """Its status."""

    def drain(self) -> None:
        """Refuse new requests."""

    def cut(self, reason: str) -> int:
        """End every unfinished request with an error; returns their number."""


@dataclass(frozen=True)
class Toll:
    """Of the requests that were unfinished when the stop began, the numbers of finished and of cut ones."""

    finished: int
    cut: int

    def describe(self) -> str:
        """The last line that a stopping server prints."""
        return f"stopped: {counted(self.finished, 'request')} finished while draining, {self.cut} cut"


def drain(
    engine: Drainable,
    timeout: float,
    hurry: Callable[[], str],
    *,
    last: EngineStatus | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Toll:
    """Refuse new requests, wait up to `timeout` seconds for the unfinished ones and cut the rest.

    `hurry`: returns the reason to stop waiting, empty if none. `last`: the last known status; if the engine does not
    answer, its unfinished requests count as cut.
    """
    until = clock() + timeout
    try:
        engine.drain()
        status = engine.status()
    except OSError:
        return Toll(0, _unfinished(last))
    unfinished = total = _unfinished(status)
    failures = 0
    why = ""
    while unfinished and not (why := hurry()) and clock() < until:
        sleep(min(_POLL, max(0.0, until - clock())))
        try:
            unfinished, failures = _unfinished(engine.status(_STATUS_TIMEOUT)), 0
        except OSError:
            failures += 1
            if failures == _TRIES:
                return Toll(total - unfinished, unfinished)
    if unfinished:
        with suppress(OSError):  # if the engine is gone, clients see their connections close
            unfinished = engine.cut(why or f"the server is stopping: its drain timeout of {timeout:g} s has passed")
    if total:
        _await_answers(engine, clock, sleep)
    return Toll(max(0, total - unfinished), unfinished)


def _await_answers(engine: Drainable, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """Wait briefly until the model processes have answered all requests."""
    until = clock() + _DELIVERY
    while clock() < until:
        sleep(_POLL)
        try:
            if not any(client.unanswered for client in engine.status().clients):
                return
        except OSError:
            return


def _unfinished(status: EngineStatus | None) -> int:
    return status.running + status.waiting if status is not None else 0
