"""Servers in the background that serve nothing: what is kept of them is real, and they start in a moment."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trtforge.machine.processes import identity_of
from trtforge.serve.config import ServeConfig
from trtforge.serve.detached.record import Record, write_record
from trtforge.serve.detached.registry import Registry
from trtforge.serve.detached.start import Started, start
from trtforge.serve.restart import ServerFailed

SERVER = """
import signal, sys, threading, time
from trtforge.core.errors import ForgeError
from trtforge.serve.detached import process
from trtforge.serve.detached.process import inherited
from trtforge.serve.restart import ServerFailed

failure = ServerFailed("the engine ended:\\nout of memory", hint="Lower it.", was_ready=True)
stop = threading.Event()

def announce_gateway(background):
    background.openai("http://127.0.0.1:4/v1")
    background.complete(["ask it"])

def live(background, behaviour):
    background.starting()
    if behaviour == "slow":
        print("note: loading", file=sys.stderr, flush=True)
        stop.wait()
        background.stopped("stopped before it was ready")
        return 0
    if behaviour == "fails":
        print("note: loading", file=sys.stderr, flush=True)
        raise ForgeError("no memory", hint="Buy some.")
    background.ready("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    announce = threading.Thread(target=announce_gateway, args=(background,))
    announce.start()
    announce.join()
    if behaviour == "restarts":
        stop.wait()
        background.restarting(failure)
        background.starting()
        background.ready("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
        stop.clear()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()
    if behaviour == "breaks":
        raise failure
    background.draining()
    background.stopped("stopped: 1 request finished while draining, 2 cut" if behaviour == "cuts" else "stopped")
    return 1 if behaviour == "cuts" else 0

behaviour = sys.argv[1]
if behaviour == "logs":
    process._LOOK = 0.01
handler = signal.SIG_IGN if behaviour == "stubborn" else lambda *_: stop.set()
signal.signal(signal.SIGTERM, handler)
signal.signal(signal.SIGUSR1, lambda *_: stop.set())
background = inherited()
try:
    status = background.run(lambda: live(background, behaviour))
except ForgeError as error:
    print(f"error: {error.message}", file=sys.stderr)
    status = 1
sys.exit(status)
"""


def command(behaviour: str) -> list[str]:
    """A program that serves nothing."""
    return [sys.executable, "-c", SERVER, behaviour]


@dataclass
class Heard:
    """What whoever starts a server hears and sees."""

    lines: list[str] = field(default_factory=list)

    def starting(self) -> None:
        """Not heard of: the command itself starts it."""
        raise AssertionError

    def ready(self, http: str, grpc: str, metrics: str) -> None:
        self.lines.append(f"ready {http} {grpc} {metrics}")

    def openai(self, url: str) -> None:
        self.lines.append(f"openai {url}")

    def complete(self, commands: Sequence[str]) -> None:
        self.lines.append(f"complete {list(commands)}")

    def restarting(self, failure: ServerFailed) -> None:
        raise AssertionError

    def draining(self) -> None:
        raise AssertionError

    def stopped(self, line: str) -> None:
        raise AssertionError


@dataclass
class Background:
    """The state directory of a test, and what was started in it."""

    registry: Registry
    heard: Heard = field(default_factory=Heard)

    def start(self, behaviour: str, repository: Path, **options: object) -> Started:
        """Start a server that serves nothing."""
        ports = {"http_port": 1, "grpc_port": 2, "metrics_port": 3, "drain_timeout": 0}
        config = ServeConfig.parse({**ports, **options}, "test")
        return start(config, repository, command(behaviour), self.heard, self.heard.lines.append)

    def left(self) -> list[str]:
        """The directories of servers."""
        return sorted(path.name for path in self.registry.root.iterdir())


def recorded(registry: Registry, name: str, process: int, **changes: object) -> Record:
    """Write the record of a server that was ready, whose process is this one unless `changes` say otherwise."""
    identity = identity_of(process)
    assert identity is not None
    record = Record(
        repository="/models/demo",
        host="127.0.0.1",
        ports={"http": 1, "grpc": 2, "metrics": 3},
        http="127.0.0.1:1",
        grpc="127.0.0.1:2",
        metrics="127.0.0.1:3",
        commands=("ask it",),
        drain_timeout=0,
        machine=os.uname().nodename,
        pid=process,
        started=identity.started,
        boot=identity.boot,
        begun=1_700_000_000,
        since=4_000_000_000,
        state="ready",
    ).model_copy(update=changes)
    registry.directory(name).mkdir(parents=True)
    (registry.directory(name) / "log").touch()
    (registry.directory(name) / "lock").touch()
    write_record(registry.directory(name), record)
    return record


@pytest.fixture
def background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Background]:
    """A state directory; servers that a test left running are killed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    registry = Registry.of_user()
    yield Background(registry)
    for server in registry.seen():
        if server.alive and server.record is not None and server.record.process.is_here():
            with suppress(ProcessLookupError):
                os.kill(server.record.pid, signal.SIGKILL)
