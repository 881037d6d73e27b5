"""An engine that cannot go on ends its process: the launcher sees that and ends the server."""

import os
import threading
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils

from trtforge.core.errors import ForgeError, RequestError
from trtforge.runtime.engine import Engine
from trtforge.runtime.requests import GenerationRequest, Output

_LAST_WORDS = 0.5  # seconds for the responses and log lines that are on their way
_ANSWER = 10.0  # seconds that an engine without one of its ranks has to say why


class EngineHealth:
    """Watches an engine's other ranks and what it says."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ending = threading.Event()

    def start(self, period_ms: int) -> None:
        """Watch the ranks on a thread of its own."""
        if self._engine.worker_pids:
            threading.Thread(target=self._watch, args=(period_ms / 1000,), name="health", daemon=True).start()

    def heard(self, output: Output) -> None:
        """Take note of an engine's output: an error that is not the request's own is the engine's end."""
        if output.error is not None and not isinstance(output.error, RequestError):
            self._end(output.error)

    def _watch(self, period: float) -> None:
        while all(Path(f"/proc/{process}").exists() for process in self._engine.worker_pids):
            time.sleep(period)
        # An idle engine has not noticed; asked for a token, it tells what that rank said last.
        self._engine.submit(GenerationRequest("why", (0,), 1), self.heard)
        if not self._ending.wait(_ANSWER):
            self._end(ForgeError("one of its ranks is gone", hint="Start the server again."))

    def _end(self, error: ForgeError) -> None:
        if self._ending.is_set():
            return
        self._ending.set()
        pb_utils.Logger.log_error(f"the engine ended: {error.message} (hint: {error.hint})")
        timer = threading.Timer(_LAST_WORDS, os._exit, (1,))
        timer.daemon = True
        timer.start()
