"""This user's servers in the background: a directory for each, with its record, its log and its lock.

A server's process holds its lock while it lives, so that neither a recycled process id nor a stale record counts as a
running server. Directories are created and removed only under a common lock.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.errors import ForgeError, mistyped
from trtforge.core.locks import is_held, locked_by, take_lock
from trtforge.core.nearest import nearest_name
from trtforge.serve.detached.places import server_names, servers_directory
from trtforge.serve.detached.record import Record, read_record

_MODE = 0o700
_KEPT = 7 * 86400.0  # seconds for which the record and log of an ended server are kept


@dataclass(frozen=True)
class Found:
    """A server that has a directory. `alive`: its process runs, perhaps on another machine.

    `record`: None if missing or damaged; `damage` describes the damage.
    """

    name: str
    log: Path
    alive: bool
    record: Record | None
    damage: str = ""


@dataclass(frozen=True)
class Registry:
    """The servers below `root`."""

    root: Path

    @classmethod
    def of_user(cls) -> "Registry":
        """The registry of this user."""
        return cls(servers_directory())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock for creating and removing servers within the block. Raises ForgeError if the directory is
        unusable."""
        with ExitStack() as held:
            try:
                self._prepare()
                held.enter_context(locked_by(self.root / ".lock"))
            except OSError as error:
                raise ForgeError(
                    f"the state of servers cannot be kept in {self.root}: {error.strerror}",
                    hint="Set XDG_STATE_HOME to a directory that you may write to, on a file system that has locks.",
                ) from None
            yield

    def directory(self, name: str) -> Path:
        """The directory of a server."""
        return self.root / name

    def log(self, name: str) -> Path:
        """The log of a server."""
        return self.directory(name) / "log"

    def is_alive(self, name: str) -> bool:
        """Whether the process of a server runs."""
        return is_held(self._lock(name))

    def record(self, name: str) -> Record | None:
        """The record of a server, None if there is none. Raises ForgeError for a damaged one."""
        return read_record(self.directory(name), name)

    def found(self) -> list[Found]:
        """All servers; requires the lock. Removes directories that are no longer needed (`_is_over`) first."""
        servers = []
        for server in map(self.find, server_names(self.root)):
            if _is_over(server):
                self.remove(server.name)
            else:
                servers.append(server)
        return servers

    def find(self, name: str) -> Found:
        """The present state of a server."""
        alive = self.is_alive(name)
        try:
            return Found(name, self.log(name), alive, self.record(name))
        except ForgeError as error:
            return Found(name, self.log(name), alive, None, error.message)

    def seen(self) -> list[Found]:
        """Like `found`, but takes the lock; creates nothing if there are no servers."""
        if not server_names(self.root):
            return []
        with self.locked():
            return self.found()

    def create(self, name: str) -> int:
        """Create a server's directory, replacing that of an ended server; returns the descriptor of its lock. Requires
        the lock."""
        self.remove(name)
        self.directory(name).mkdir(_MODE)
        return take_lock(self._lock(name))

    def remove(self, name: str) -> None:
        """Delete a server's directory; requires the lock. Only for ended servers, or by the server's own process."""
        shutil.rmtree(self.directory(name), ignore_errors=True)

    def remove_ended(self, name: str) -> None:
        """Delete a server's directory, unless a server of this name runs."""
        with self.locked():
            if not self.is_alive(name):
                self.remove(name)

    def _lock(self, name: str) -> Path:
        return self.directory(name) / "lock"

    def _prepare(self) -> None:
        """Create the directory, readable only by this user. Raises ForgeError if it belongs to another user."""
        for place in (self.root.parent, self.root):
            place.mkdir(_MODE, parents=True, exist_ok=True)
            if place.stat().st_uid != os.geteuid():
                raise ForgeError(
                    f"{place} belongs to another user",
                    hint="Set XDG_STATE_HOME to a directory of your own: servers are known to their own user only.",
                )
        self.root.chmod(_MODE)


def named(servers: list[Found], name: str) -> Found:
    """The server with this name. Raises ForgeError with the nearest one if there is none."""
    match = next((server for server in servers if server.name == name), None)
    if match is not None:
        return match
    meant = nearest_name(name, [server.name for server in servers])
    listed = ", ".join(server.name for server in servers)
    otherwise = f"Known are: {listed}." if servers else "`trtforge serve REPO --detach` starts one."
    raise mistyped(f"there is no server {name} in the background", name, meant, otherwise=otherwise)


def _is_over(server: Found) -> bool:
    """Whether a server has ended without ever being complete, or ended long ago."""
    if server.alive or server.damage:
        return False
    record = server.record
    return record is None or not record.commands or time.time() - record.since > _KEPT
