"""Starts a server in the background and shows its output until it is ready."""

import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trtforge.core.errors import ForgeError
from trtforge.machine.processes import SIGTERM_STATUS, end_with_parent, identity_of
from trtforge.serve.announcements import Announcements
from trtforge.serve.config import ServeConfig
from trtforge.serve.detached.places import new_name
from trtforge.serve.detached.process import VARIABLE
from trtforge.serve.detached.record import Record, write_record
from trtforge.serve.detached.registry import Found, Registry

_POLL = 0.05
_ALL = ("0.0.0.0", "::")
_DATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ")
"""Start of the log lines that are also announced to `told`."""


class NotReadyError(Exception):
    """A server ended before it was ready and printed the reason. `status`: its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


@dataclass(frozen=True)
class Started:
    """A server in the background that is ready."""

    name: str
    log: Path
    record: Record


def start(
    config: ServeConfig, repository: Path, command: Sequence[str], told: Announcements, show: Callable[[str], None]
) -> Started:
    """Start `command`, which serves `repository` with `config`, in the background; returns when it is ready.

    `told` receives the server's announcements until then, `show` the other lines of its log. Raises ForgeError if
    another server in the background has one of the ports, or if the new server is stopped or killed; NotReadyError if
    it fails. In these cases, and if this function is interrupted, nothing of the server remains.
    """
    registry = Registry.of_user()
    with _begun(registry, config, repository, command) as (name, child):
        record = _follow(registry, name, child, told, show)
        child.returncode = 0  # it outlives this process, which does not wait for its end
        return Started(name, registry.log(name), record)


def require_unserved(config: ServeConfig, repository: Path, servers: Sequence[Found]) -> None:
    """Raises ForgeError if a server in the background has one of the ports, also while it does not listen yet.

    Servers of other machines or containers are ignored, as they may have separate ports.
    """
    for server in servers:
        record = server.record
        if record is None or not record.process.is_here() or not _meet(record.host, config.host):
            continue
        ports = sorted(set(record.ports.values()) & set(config.ports.values()))
        if not ports:
            continue
        hint = f"End it with `trtforge stop {server.name}`, or choose other ports."
        if record.repository == str(repository.resolve()):
            already = f"{repository} is served on these ports already: {server.name} is {record.state}"
            raise ForgeError(already, hint=hint)
        listed = ", ".join(f"{config.host}:{port}" for port in ports)
        raise ForgeError(f"in use by the server {server.name} ({record.repository}): {listed}", hint=hint)


def _meet(one: str, other: str) -> bool:
    return one == other or one in _ALL or other in _ALL


@contextmanager
def _begun(
    registry: Registry, config: ServeConfig, repository: Path, command: Sequence[str]
) -> "Iterator[tuple[str, subprocess.Popen[bytes]]]":
    """The name and the process of a new server; an error within the block ends it and removes its directory."""
    with registry.locked():
        servers = registry.found()
        require_unserved(config, repository, servers)
        name = new_name(repository, [server.name for server in servers if server.alive])
        lock = registry.create(name)
        try:
            child = _spawn(registry.log(name), name, lock, command)
            with _ended_by_errors(child):
                write_record(registry.directory(name), _first_record(config, repository, child.pid))
        except BaseException:
            registry.remove(name)
            raise
        finally:
            os.close(lock)  # the child holds it
    try:
        with _ended_by_errors(child):
            yield name, child
    except BaseException:
        registry.remove_ended(name)
        raise


@contextmanager
def _ended_by_errors(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    except BaseException:
        if child.poll() is None:
            child.terminate()
        child.wait()
        raise


def _spawn(log: Path, name: str, lock: int, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start the process in its own session. Until it is ready, it ends together with this process in any case."""
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
            env=os.environ | {VARIABLE: f"{lock}:{name}"},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def _first_record(config: ServeConfig, repository: Path, pid: int) -> Record:
    process, now = identity_of(pid), time.time()
    assert process is not None, "a child that was not waited for has an identity"
    return Record(
        repository=str(repository.resolve()),
        host=config.host,
        ports=config.ports,
        http=config.address(config.http_port),
        grpc=config.grpc_address,
        metrics=config.address(config.metrics_port),
        drain_timeout=config.drain_timeout,
        machine=platform.node(),
        pid=pid,
        started=process.started,
        boot=process.boot,
        begun=now,
        since=now,
    )


def _follow(
    registry: Registry,
    name: str,
    child: "subprocess.Popen[bytes]",
    told: Announcements,
    show: Callable[[str], None],
) -> Record:
    """Wait until a server is complete; returns its record."""
    was_ready, had_openai = 0.0, False
    with registry.log(name).open(encoding="utf-8", errors="replace") as log:
        lines = _Lines(log, show)
        while True:
            status = child.poll()  # read first, so that no output is missed
            record = registry.record(name)
            lines.show_new()
            if record is not None and record.state == "ready" and record.since != was_ready:
                was_ready = record.since
                told.ready(record.http, record.grpc, record.metrics)
            if record is not None and record.openai is not None and not had_openai:
                had_openai = True
                told.openai(record.openai)
            if record is not None and record.commands and record.state == "ready":
                told.complete(record.commands)
                return record
            if status is not None:
                lines.show_new(end=True)
                raise _not_ready(name, status)
            time.sleep(_POLL)


class _Lines:
    """The lines of a growing log; each is shown once, when it is complete."""

    def __init__(self, log: IO[str], show: Callable[[str], None]) -> None:
        self._log, self._show, self._rest = log, show, ""

    def show_new(self, *, end: bool = False) -> None:
        """Show the new lines. `end`: also a last line without line feed."""
        *whole, self._rest = (self._rest + self._log.read()).split("\n")
        if end and self._rest:
            whole.append(self._rest)
        for line in whole:
            if not _DATED.match(line):
                self._show(line)


def _not_ready(name: str, status: int) -> Exception:
    again = "Start it again."
    if status in (0, SIGTERM_STATUS):
        return ForgeError(f"{name} was stopped before it was ready", hint=again)
    if status < 0:
        return ForgeError(f"{name} was ended by {signal.Signals(-status).name} before it was ready", hint=again)
    return NotReadyError(status)
