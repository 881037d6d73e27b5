"""The status of an engine process, and the commands of its supervisor."""

import itertools
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from trtforge.engine_process.frames import BadFrame, Frame, FrameReader

State = Literal["serving", "draining", "failed"]


class EngineUnreachable(OSError):
    """The engine process does not answer on its socket."""


@dataclass(frozen=True)
class ClientStatus:
    """A connected model process. `silent_seconds`: time since its last heartbeat, which it sends every second."""

    name: str
    pid: int
    unanswered: int
    silent_seconds: float


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot. `running` and `waiting` count sequences now; `finished`, `refused` and `cut` all so far.

    `stalled_seconds`: since the last progress while sequences are unfinished, else 0. `error`, `hint`: why it failed.
    """

    pid: int
    state: State
    running: int
    waiting: int
    generated_tokens: int
    finished: int
    refused: int
    cut: int
    stalled_seconds: float
    error: str
    hint: str
    clients: tuple[ClientStatus, ...]
    worker_pids: tuple[int, ...] = ()

    def encode(self) -> Mapping[str, Any]:
        """The status as a JSON object for a frame's header."""
        return asdict(self)

    @classmethod
    def decode(cls, values: Mapping[str, Any]) -> "EngineStatus":
        """The inverse of `encode`. Raises BadFrame."""
        try:
            clients = tuple(ClientStatus(**client) for client in values["clients"])
            return cls(**{**values, "clients": clients, "worker_pids": tuple(values["worker_pids"])})
        except (KeyError, TypeError) as error:
            raise BadFrame(f"a status that cannot be read: {error!r}") from None


class EngineControl:
    """Sends commands to the engine process at `socket`; each call opens its own connection."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._numbers = itertools.count()

    def status(self, timeout: float = 2.0) -> EngineStatus:
        """The engine's status. Raises EngineUnreachable without an answer within `timeout` seconds."""
        return EngineStatus.decode(self._ask({"type": "status"}, timeout)["status"])

    def drain(self) -> None:
        """Refuse new requests with UNAVAILABLE from now on. Raises EngineUnreachable."""
        self._ask({"type": "drain"}, 2.0)

    def cut(self, reason: str) -> int:
        """End every unfinished sequence with an error; returns their number. Raises EngineUnreachable."""
        return int(self._ask({"type": "cut", "reason": reason}, 5.0)["cut"])

    def _ask(self, command: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        number = next(self._numbers)
        deadline = time.monotonic() + timeout
        reader = FrameReader()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
                channel.settimeout(timeout)
                channel.connect(str(self._socket))
                channel.sendall(Frame({**command, "number": number}).encode())
                while True:
                    channel.settimeout(max(0.001, deadline - time.monotonic()))
                    data = channel.recv(1 << 16)
                    if not data:
                        raise EngineUnreachable(f"{self._socket}: the connection was closed")
                    for frame in reader.feed(data):
                        if frame.header.get("number") == number:
                            return frame.header
        except (OSError, BadFrame) as error:
            raise EngineUnreachable(f"{self._socket}: {error}") from None
