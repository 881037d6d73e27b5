"""A server in the foreground: started, waited for, watched and ended with everything that belongs to it."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from trtforge.core.errors import ForgeError
from trtforge.core.processes import end_session, end_with_parent, handled, lives_in, session_processes
from trtforge.serve.environment import UMASK
from trtforge.serve.launchers import Launch
from trtforge.serve.server_log import first_error

_POLL = 0.1
_STUB = "triton_python_backend_stub"
_GRACE = 10.0


class Server:
    """A running server process, leader of a session of its own."""

    def __init__(self, launch: Launch, log: Path, *, verbose: bool) -> None:
        self._launch = launch
        self._log = log
        self._stop_signals = 0
        self._models: frozenset[int] = frozenset()
        with _output(log, verbose=verbose) as output:
            self._process = subprocess.Popen(
                launch.argv,
                env=launch.process_environment(),
                umask=UMASK,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def stopping(self) -> bool:
        """Whether somebody asked us to end."""
        return self._stop_signals > 0

    def stop(self) -> None:
        """Let it drain; a second time ends it at once."""
        self._stop_signals += 1
        self._process.send_signal(signal.SIGTERM if self._stop_signals == 1 else signal.SIGKILL)

    def wait_ready(self, is_ready: Callable[[float], bool], timeout: float) -> bool:
        """True once `is_ready` (given the time left); False if it was stopped before.

        Raises ForgeError if it ends, takes too long, or `is_ready` raises it.
        """
        until = time.monotonic() + timeout
        while not self.stopping:
            self._require_alive("ended while starting")
            try:
                if is_ready(max(1.0, until - time.monotonic())):
                    self._models = self._model_processes()
                    return True
            except ForgeError:
                if self.stopping:
                    return False
                self._require_alive("ended while starting")
                raise
            if time.monotonic() > until:
                raise self._failure(f"was not ready after {timeout:.0f} s", "Raise --ready-timeout.")
            time.sleep(_POLL)
        return False

    def wait(self, drain_timeout: float) -> None:
        """Return when it was stopped and is gone. Raises ForgeError if it, or one of its models, ended by itself."""
        stop_at: float | None = None
        while self._process.poll() is None:
            if self.stopping:
                stop_at = stop_at or time.monotonic() + drain_timeout + _GRACE
                if time.monotonic() > stop_at:
                    self._process.kill()
            elif not all(lives_in(self._process.pid, process) for process in self._models):
                # Triton would start the model's process anew at the next request, with whatever ended it unseen.
                raise self._failure("lost a model's process", "Start again; --verbose shows the whole log.")
            time.sleep(_POLL)
        self._require_alive("ended")

    def end(self) -> None:
        """Leave no process behind."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        end_session(self._process.pid)
        if self._launch.cleanup:
            subprocess.run(self._launch.cleanup, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)

    def _model_processes(self) -> frozenset[int]:
        processes = session_processes(self._process.pid)
        return frozenset(process for process, program in processes.items() if program == _STUB)

    def _require_alive(self, how: str) -> None:
        code = self._process.poll()
        if code is not None and not self.stopping:
            raise self._failure(f"{how} with status {code}", "See the whole log with --verbose.")

    def _failure(self, what: str, hint: str) -> ForgeError:
        error = first_error(self._log)
        return ForgeError(f"the Triton server {what}" + (f":\n{error}" if error else ""), hint=hint)


@contextmanager
def signals_to(server: Server) -> Iterator[None]:
    """SIGTERM and SIGINT stop the server while this lasts."""

    def handle(number: int, frame: FrameType | None) -> None:
        server.stop()

    with handled((signal.SIGTERM, signal.SIGINT), handle):
        yield


@contextmanager
def _output(log: Path, *, verbose: bool) -> Iterator[IO[bytes]]:
    """Where the server writes: its log, or our stderr."""
    if verbose:
        yield sys.stderr.buffer
        return
    with log.open("wb") as file:
        yield file
