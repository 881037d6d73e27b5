"""Draining: unfinished requests end by themselves, or are cut with an error when the time for that is over."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from trtforge.engine_process.control import EngineStatus

_POLL = 0.1
_LAST_WORDS = 0.5  # seconds for responses that are on their way to their clients
_TRIES = 3
_ANSWER = 1.0  # seconds


class Drainable(Protocol):
    """An engine that can be drained: `EngineControl`. Every method raises OSError if the engine does not answer."""

    def status(self, timeout: float = 2.0) -> EngineStatus:
        """Its status."""

    def drain(self) -> None:
        """Refuse new requests."""

    def cut(self, reason: str) -> int:
        """End every unfinished request with an error; how many."""


@dataclass(frozen=True)
class Toll:
    """What became of the requests that were unfinished when the stop began."""

    finished: int
    cut: int

    def describe(self) -> str:
        """The last line of a server that stops."""
        return f"stopped: {_requests(self.finished)} finished while draining, {self.cut} cut"


def drain(
    engine: Drainable,
    timeout: float,
    hurry: Callable[[], str],
    *,
    last: EngineStatus | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Toll:
    """Refuse new requests, wait up to `timeout` seconds for the others and cut what is left.

    `hurry`: why not to wait any longer; empty while there is time. `last`: the status that counts if the engine does
    not answer at all: what was unfinished then is lost.
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
            unfinished, failures = _unfinished(engine.status(_ANSWER)), 0
        except OSError:
            failures += 1
            if failures == _TRIES:
                return Toll(total - unfinished, unfinished)
    if unfinished:
        with suppress(OSError):  # without the engine, the end of their connections tells the clients
            unfinished = engine.cut(why or f"the server stops: its drain timeout of {timeout:g} s is over")
    if total:
        _await_answers(engine, clock, sleep)
    return Toll(max(0, total - unfinished), unfinished)


def _await_answers(engine: Drainable, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """Wait until the model processes have nothing to answer any more, but not long."""
    until = clock() + _LAST_WORDS
    while clock() < until:
        sleep(_POLL)
        try:
            if not any(client.unanswered for client in engine.status().clients):
                return
        except OSError:
            return


def _unfinished(status: EngineStatus | None) -> int:
    return status.running + status.waiting if status is not None else 0


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
