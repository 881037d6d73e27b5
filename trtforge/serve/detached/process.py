"""The process of a server in the background: it updates its record and adds times to the events in its log."""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO, TextIOWrapper
from typing import Any

from trtforge.core.errors import ForgeError, first_line
from trtforge.core.figures import moment
from trtforge.machine.processes import outlive_parent
from trtforge.serve.announcements import openai_line, ready_line
from trtforge.serve.detached.record import Record, State, write_record
from trtforge.serve.detached.registry import Registry
from trtforge.serve.log_limit import emptied
from trtforge.serve.restart import ServerFailed

_LOOK = 30.0  # seconds between checks of the log's size

VARIABLE = "TRTFORGE_DETACHED"
"""The variable by which the starting command passes LOCK:NAME to the server; LOCK is an inherited descriptor."""


def inherited() -> "Background | None":
    """This process as a server in the background; None if it was not started as one, as for a server's children."""
    lock, _, name = os.environ.pop(VARIABLE, "").partition(":")
    if not name:
        return None
    os.set_inheritable(int(lock), False)
    sys.stderr = Log(sys.stderr.fileno())
    registry = Registry.of_user()
    with registry.locked():  # the command that starts it writes the first record under this lock
        record = registry.record(name)
    assert record is not None, "the directory of the state of servers is another one here"
    return Background(registry, name, record)


class Log(TextIOWrapper):
    """Standard error of a server in the background: text that a full disk cannot store is dropped, without an error."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(FileIO(descriptor, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)

    def write(self, text: str) -> int:
        """Write as much as there is room for."""
        with suppress(OSError):
            return super().write(text)
        return len(text)


class Background:
    """The announcements of a server in the background: written to its record and its log."""

    def __init__(self, registry: Registry, name: str, record: Record) -> None:
        self._registry, self._name, self._record = registry, name, record
        self._writing = threading.Lock()
        self._line = ""

    def run(self, serve: Callable[[], int]) -> int:
        """Run `serve` and record its exit status or error; returns the exit status.

        The record of a server that ends before it is complete is removed, as the starting command reports its error.
        """
        threading.Thread(target=self._bound_log, name="log-limit", daemon=True).start()
        try:
            status = serve()
        except BaseException as error:
            self._end("failed", error.message if isinstance(error, ForgeError) else first_line(error), error)
            raise
        self._end("stopped", self._line or "stopped", exit_status=status)
        return status

    def starting(self) -> None:
        """Record the start. It counts as a restart only if the server was complete before."""
        again = bool(self._record.commands)
        self._note("starting", f", process {os.getpid()}", restarts=self._record.restarts + again)

    def ready(self, http: str, grpc: str, metrics: str) -> None:
        """Record the addresses; from now on the server does not end with the command that started it."""
        outlive_parent()
        self._note("ready", ready_line(http, grpc, metrics).removeprefix("ready"), reason="", hint="")

    def openai(self, url: str) -> None:
        """Record the address of OpenAI's API."""
        self._note(None, openai_line(url), openai=url)

    def complete(self, commands: Sequence[str]) -> None:
        """Record the commands, which the starting command reads."""
        self._note(None, "", commands=tuple(commands))

    def restarting(self, failure: ServerFailed) -> None:
        """Record the failure until the server is ready again."""
        self._note("restarting", f": {first_line(failure)}", reason=failure.message, hint=failure.hint)

    def draining(self) -> None:
        """Record the state, which `trtforge stop` shows."""
        self._note("draining", "")

    def stopped(self, line: str) -> None:
        """Print the line and keep it for the last record."""
        self._line = line
        print(line, file=sys.stderr, flush=True)

    def _bound_log(self) -> None:
        """Limit the log while this process lives: at most two files, the older one is `log.1`."""
        log = self._registry.log(self._name)
        while True:
            emptied(log, log.with_name(f"{log.name}.1"))
            time.sleep(_LOOK)

    def _end(self, state: State, reason: str, error: BaseException | None = None, exit_status: int = 1) -> None:
        if not self._record.commands:
            with suppress(ForgeError), self._registry.locked():
                self._registry.remove(self._name)
            return
        hint = error.hint if isinstance(error, ForgeError) else ""
        self._note(state, "", reason=reason, hint=hint, exit_status=exit_status)

    def _note(self, state: State | None, said: str, **changes: Any) -> None:
        """Write a line with the time to the log and the changes to the record; a full disk does not end the server."""
        with self._writing:
            now = time.time()
            if state is not None:
                changes |= {"state": state, "since": now}
            self._record = self._record.model_copy(update=changes)
            if state is not None or said:
                print(f"{moment(now)} {state or ''}{said}", file=sys.stderr, flush=True)
            with suppress(OSError):
                write_record(self._registry.directory(self._name), self._record)
