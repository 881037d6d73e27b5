"""The front as a child process: its command, and starting, stopping and ending it."""

import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.serve.environment import UMASK, server_environment

_POLL = 0.05
_LONGEST_SOCKET_PATH = 100


@dataclass(frozen=True)
class FrontCommand:
    """What starts a front: where it listens and where Triton's own HTTP is. Holds no secret."""

    host: str
    port: int
    upstream: str
    opened: tuple[str, ...] = ()
    api_key_file: Path | None = None

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line."""
        return (
            *(sys.executable, "-m", "trtforge.serve.front"),
            *(f"--host={self.host}", f"--port={self.port}", f"--upstream={self.upstream}"),
            *(f"--open={door}" for door in self.opened),
            *((f"--api-key-file={self.api_key_file}",) if self.api_key_file is not None else ()),
        )


class FrontProcess:
    """A running front, leader of a session of its own. It ends when this process does."""

    def __init__(self, command: FrontCommand, log: Path) -> None:
        self._command = command
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command.argv,
                env=server_environment({}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=UMASK,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Return once it accepts connections. Raises ForgeError if it ends or does not."""
        until = time.monotonic() + timeout
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._command.host, self._command.host)
        while True:
            try:
                socket.create_connection((host, self._command.port), timeout=1.0).close()
            except OSError:
                pass
            else:
                # Somebody else may hold the port: then the front has ended, or is about to.
                time.sleep(_POLL)
                if self.poll() is None:
                    return
            if self.poll() is not None or time.monotonic() > until:
                said = self._log.read_text(encoding="utf-8", errors="replace").strip()
                raise ForgeError(
                    "the HTTP front did not start" + (f":\n{said}" if said else ""),
                    hint=f"Choose another --http-port if {self._command.port} is in use.",
                )
            time.sleep(_POLL)

    def stop_accepting(self) -> None:
        """Take no more connections and requests; those that run go on, then it ends."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def end(self, patience: float = 2.0) -> None:
        """Leave no process behind. Clients whose server is gone have `patience` seconds to be told."""
        self.stop_accepting()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def private_http(runtime: Path) -> str:
    """Where Triton's own HTTP listens: a Unix socket in the runtime directory, which is its user's alone.

    A path that is too long for a socket leaves a port of the loopback interface.
    """
    path = runtime / "http.sock"
    if len(str(path)) <= _LONGEST_SOCKET_PATH:
        return f"unix:{path}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def http_arguments(upstream: str, port: int) -> tuple[str, str]:
    """Triton's options for the address that `private_http` chose; `port` counts for nothing beside a Unix socket."""
    if upstream.startswith("unix:"):
        return f"--http-address={upstream}", f"--http-port={port}"
    host, _, private = upstream.rpartition(":")
    return f"--http-address={host}", f"--http-port={private}"
