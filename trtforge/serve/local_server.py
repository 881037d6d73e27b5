"""A server for one command: `trtforge serve` in a child process on free ports, which ends with the command."""

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import IO

from trtforge.core.defaults import LOOPBACK
from trtforge.core.errors import ForgeError, killed
from trtforge.core.interpreter import module_arguments
from trtforge.machine.processes import end_with_parent
from trtforge.serve.free_ports import free_ports
from trtforge.serve.request import Unavailable, Unreachable

_STOP_SECONDS = 20.0
_END_SECONDS = 5.0  # time from the end of an engine, which clients see at once, to the end of its server
_LINES = 12  # of the log, shown when the server does not start


@dataclass(frozen=True)
class LocalServer:
    """A server that is ready: addresses as HOST:PORT.

    `why_ended`: returns its error if it has ended or ends within the given seconds, else None.
    """

    grpc: str
    http: str
    metrics: str
    why_ended: Callable[[float], ForgeError | None] = lambda _: None

    def error_behind(self, error: ForgeError) -> ForgeError | None:
        """The server's own error if the request's `error` is due to the server's end; None if the server still runs."""
        return self.why_ended(_END_SECONDS if isinstance(error, Unavailable | Unreachable) else 0.0)


@contextlib.contextmanager
def local_server(repository: Path, *, ready_timeout: float) -> Iterator[LocalServer]:
    """Serve `repository` for as long as the context is open.

    The child is in its own session, so that Ctrl-C in a terminal interrupts only this command. Raises ForgeError, with
    the server's error, if the server does not become ready or ends before a request was answered.
    """
    ports = free_ports(LOOPBACK, 3)
    names = ("--http-port", "--grpc-port", "--metrics-port")
    options = [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]
    command = [sys.executable, *module_arguments("trtforge"), "serve", str(repository), *options, "--no-openai"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            [*command, "--ready-timeout", f"{ready_timeout:g}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            assert child.stdout is not None
            if not child.stdout.readline().startswith("ready "):
                status = child.wait()
                log.seek(0)
                raise killed("the server", status) or _not_ready(log.read(), repository)
            threading.Thread(target=child.stdout.read, daemon=True).start()  # a full pipe would block the server
            http, grpc, metrics = (f"{LOOPBACK}:{port}" for port in ports)
            try:
                yield LocalServer(grpc, http, metrics, lambda seconds: _why_ended(child, log, seconds))
            except (Unavailable, Unreachable) as error:
                raise _why_ended(child, log, _END_SECONDS) or error from None
        finally:
            _end(child)


def _why_ended(child: "subprocess.Popen[str]", log: IO[str], seconds: float) -> ForgeError | None:
    """The error of a server that ended by itself; None if it still runs after `seconds`."""
    try:
        status = child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    log.seek(0)
    again = "Run it again."
    ended = ForgeError(f"the server ended with status {status}", hint=again)
    return killed("the server", status) or _own_error(log.read(), again) or ended


def _not_ready(log: str, repository: Path) -> ForgeError:
    """The server's own error, else the last lines of its log."""
    again = f"Run `trtforge serve {quote(str(repository))} --verbose` to see the whole log."
    return _own_error(log, again) or _last_lines(log, again)


def _own_error(log: str, again: str) -> ForgeError | None:
    """The server's last error with its whole hint; `again` replaces a hint about the options of `trtforge serve`."""
    _, told, last = f"\n{log}".rpartition("\nerror: ")
    if told:
        error, _, hint = last.partition("\nhint: ")
        return ForgeError(error.rstrip(), hint=again if "--verbose" in hint or not hint else hint.rstrip())
    return None


def _last_lines(log: str, again: str) -> ForgeError:
    lines = [line for line in log.splitlines() if line.strip()]
    return ForgeError("\n".join(["the server did not start:", *lines[-_LINES:]]), hint=again)


def _end(child: "subprocess.Popen[str]") -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
