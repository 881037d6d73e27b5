"""Threads that poll a running server, so that an unanswered query does not block other work."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from trtforge.engine_process.control import EngineControl, EngineStatus
from trtforge.engine_process.rendezvous import socket_file
from trtforge.serve.plain_http import NoAnswer
from trtforge.serve.probe import health, send_ping

_ENGINE_PERIOD = 0.25  # seconds
_HEALTH_PERIOD = 1.0
_HEALTH_TIMEOUT = 5.0
_PING_TIMEOUT = 10.0


class EngineObserver:
    """Polls the engine process for its status."""

    def __init__(self, control: EngineControl, status: EngineStatus) -> None:
        self._control = control
        self._answer = (status, time.monotonic())
        self._ending = threading.Event()
        threading.Thread(target=self._run, name="engine-observer", daemon=True).start()

    @property
    def answer(self) -> tuple[EngineStatus, float]:
        """The last status and when it arrived, as time.monotonic()."""
        return self._answer

    def restart(self) -> None:
        """Count silence from now on."""
        self._answer = (self._answer[0], time.monotonic())

    def end(self) -> None:
        """Ask no more."""
        self._ending.set()

    def _run(self) -> None:
        while not self._ending.wait(_ENGINE_PERIOD):
            try:
                self._answer = (self._control.status(), time.monotonic())
            except OSError:
                continue


class HealthObserver:
    """Polls Triton's health endpoint. Any answer counts, even "not ready"."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._answered_at = time.monotonic()
        self._ending = threading.Event()
        threading.Thread(target=self._run, name="health-observer", daemon=True).start()

    def silent_seconds(self, now: float) -> float:
        """Seconds since the last answer."""
        return now - self._answered_at

    def restart(self) -> None:
        """Count silence from now on."""
        self._answered_at = time.monotonic()

    def end(self) -> None:
        """Ask no more."""
        self._ending.set()

    def _run(self) -> None:
        while not self._ending.wait(_HEALTH_PERIOD):
            if health(self._url, "live", _HEALTH_TIMEOUT) is not None:
                self._answered_at = time.monotonic()


class PathCheck:
    """Sends a request that generates nothing through the server on `start`. An error counts as an answer."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._busy = False
        self.error = ""

    def start(self) -> None:
        """Send a request, unless the last one is still unanswered."""
        if not self._busy:
            self._busy = True
            threading.Thread(target=self._run, name="path-check", daemon=True).start()

    def _run(self) -> None:
        try:
            send_ping(self._url, self._model, _PING_TIMEOUT)
            self.error = ""
        except NoAnswer as error:
            self.error = error.message
        finally:
            self._busy = False


def within(seconds: float, call: Callable[[], object]) -> None:
    """Run `call` on a thread and wait at most `seconds`. Ignores OSError: the engine does not answer."""

    def run() -> None:
        try:
            call()
        except OSError:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


def engine_of(runtime: Path, model: str) -> EngineControl | None:
    """The engine process behind `model`; None for an engine that runs inside Triton."""
    path = socket_file(runtime, model)
    return EngineControl(path) if path.exists() else None
