"""Stops a server in the background: asks it once, then waits while it drains as in the foreground."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from trtforge.core.errors import ForgeError
from trtforge.core.locks import release_shared, take_lock
from trtforge.serve.detached.record import Record
from trtforge.serve.detached.registry import Found, Registry, named
from trtforge.serve.detached.status import status_of

MARGIN = 30.0
"""Seconds after the drain timeout in which a server must end its processes."""
_POLL = 0.1
_KILLED = 5.0  # seconds to wait for a killed process
_ASKED = "stopping"
_WAITING = "waiting"
_REMOVED = "its record was removed meanwhile"

Outcome = Literal["stopped", "failed", "killed", "had ended"]


@dataclass(frozen=True)
class Stopped:
    """The outcome for a server. `stopped`: as requested; `killed`: it did not end in time; `had ended`: before the
    request.

    `exit_status`: of its process, None if not recorded.
    """

    name: str
    outcome: Outcome
    reason: str
    exit_status: int | None

    @property
    def is_clean(self) -> bool:
        """Whether the stop lost nothing."""
        return self.outcome == "had ended" or (self.outcome == "stopped" and self.exit_status == 0)


def chosen(registry: Registry, name: str | None) -> Found:
    """The server to stop; without a name the only running server, else the only server. Raises ForgeError."""
    servers = registry.seen()
    if name is not None:
        return named(servers, name)
    candidates = [server for server in servers if server.alive] or servers
    if not candidates:
        raise ForgeError("no server runs in the background", hint="`trtforge serve REPO --detach` starts one.")
    if len(candidates) > 1:
        names = [server.name for server in candidates]
        raise ForgeError(
            f"which server? There are {', '.join(names)}",
            hint=f"Name one (`trtforge stop {names[0]}`), or stop them with `trtforge stop --all`.",
        )
    return candidates[0]


def ask(registry: Registry, server: Found) -> None:
    """Send SIGTERM to a running server, once only: a second signal would cut its requests.

    Raises ForgeError if its process is not on this machine.
    """
    with registry.locked():
        now = registry.find(server.name)
        record = now.record
        if not now.alive or (record is not None and record.exit_status is not None):
            return
        if record is None:
            raise ForgeError(
                f"{server.name} runs, but its record does not name its process: {status_of(now).reason}",
                hint=f"Find it with `ps -ef | grep serve`, end it, and delete {registry.directory(server.name)}.",
            )
        if not record.process.is_here():
            raise ForgeError(
                f"{server.name} is process {record.pid} of {record.machine}, not of this machine or container",
                hint=f"Run `trtforge stop {server.name}` there.",
            )
        try:
            (registry.directory(server.name) / _ASKED).touch(exist_ok=False)
        except FileExistsError:
            return
        with suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)


def wait(registry: Registry, server: Found) -> Stopped:
    """Wait until a server that got SIGTERM has ended; kill it if that takes too long.

    The last waiting process removes its record, so that all of them can read how it ended.
    """
    if not server.alive:
        registry.remove_ended(server.name)
        return Stopped(server.name, "had ended", status_of(server).reason, None)
    try:
        waiting = take_lock(registry.directory(server.name) / _WAITING, shared=True)
    except OSError:
        return Stopped(server.name, "had ended", _REMOVED, None)
    try:
        return _waited(registry, server, waiting)
    finally:
        os.close(waiting)


def _waited(registry: Registry, server: Found, waiting: int) -> Stopped:
    """Wait as `wait` does. `waiting`: descriptor of the lock that all processes waiting for the server share."""
    assert server.record is not None, "it was asked"
    last = server.record
    longest = last.drain_timeout + MARGIN
    until = time.monotonic() + longest
    killed = False
    while registry.is_alive(server.name):
        current = registry.record(server.name)
        if current is not None and current.process != last.process:
            break  # it has ended, and a new server has its name
        last = current or last
        if time.monotonic() > until:
            if killed:
                raise ForgeError(
                    f"{server.name} (process {last.pid}) cannot be killed",
                    hint="It hangs in the kernel, perhaps in a driver: `dmesg` may say more.",
                )
            with suppress(ProcessLookupError):
                os.kill(last.pid, signal.SIGKILL)
            killed, until = True, time.monotonic() + _KILLED
        time.sleep(_POLL)
    found = _taken(registry, server.name, last, waiting)
    if killed:
        return Stopped(server.name, "killed", f"it did not end within {longest:g} s", None)
    return _outcome(server.name, last if found is None else found, is_last=found is not None)


def _taken(registry: Registry, name: str, last: Record, waiting: int) -> Record | None:
    """The last record of an ended server, None if gone; removes it if no other process waits for the server."""
    with registry.locked():
        found = registry.record(name)
        alone = release_shared(waiting)
        if found is None or found.process != last.process:
            return None
        if alone:
            registry.remove(name)
        return found


def _outcome(name: str, record: Record, *, is_last: bool) -> Stopped:
    """The outcome by a record. `is_last`: no later record was written."""
    if record.state in ("stopped", "failed"):
        outcome: Outcome = "stopped" if record.state == "stopped" else "failed"
        return Stopped(name, outcome, record.reason, record.exit_status)
    if not record.commands:
        return Stopped(name, "stopped", "stopped before it was ready", 0)
    if not is_last:
        return Stopped(name, "had ended", _REMOVED, None)
    return Stopped(name, "killed", f"its process {record.pid} was killed while it stopped", None)
