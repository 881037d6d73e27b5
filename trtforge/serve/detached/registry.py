"""This user's servers in the background: a directory for each, with its record, its log and the lock that it holds.

A server's process holds its lock for as long as it lives, so that neither a recycled process id nor a record that was
left behind is taken for a server. What changes which directories there are happens under the lock of all of them.
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
_KEPT = 7 * 86400.0  # seconds that the record and the log of a server that has ended are kept


@dataclass(frozen=True)
class Found:
    """A server of which there is a directory. `alive`: its process runs, perhaps on another machine.

    `record` is None where there is none, or where it is damaged: `damage` says how.
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
        """Those of this user."""
        return cls(servers_directory())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else begins or removes a server within the block. Raises ForgeError if the directory is of no use."""
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
        """All servers. Only under the lock. Removes first what nobody needs: see `_is_over`."""
        servers = []
        for server in map(self.find, server_names(self.root)):
            if _is_over(server):
                self.remove(server.name)
            else:
                servers.append(server)
        return servers

    def find(self, name: str) -> Found:
        """A server as it is now."""
        alive = self.is_alive(name)
        try:
            return Found(name, self.log(name), alive, self.record(name))
        except ForgeError as error:
            return Found(name, self.log(name), alive, None, error.message)

    def seen(self) -> list[Found]:
        """As `found`, taking the lock; nothing is created where there is no server."""
        if not server_names(self.root):
            return []
        with self.locked():
            return self.found()

    def create(self, name: str) -> int:
        """A new directory for a server, in place of one that has ended; the descriptor of its lock. Under the lock."""
        self.remove(name)
        self.directory(name).mkdir(_MODE)
        return take_lock(self._lock(name))

    def remove(self, name: str) -> None:
        """Delete what is left of a server. Only under the lock, of one that has ended, or by its own process."""
        shutil.rmtree(self.directory(name), ignore_errors=True)

    def remove_ended(self, name: str) -> None:
        """Delete what is left of a server, unless one of this name runs."""
        with self.locked():
            if not self.is_alive(name):
                self.remove(name)

    def _lock(self, name: str) -> Path:
        return self.directory(name) / "lock"

    def _prepare(self) -> None:
        """Make the directory, which only this user can read. Raises ForgeError if it is another user's."""
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
    """Whether a server has ended that nobody was told of, because it never was ready, or that ended long ago."""
    if server.alive or server.damage:
        return False
    record = server.record
    return record is None or not record.commands or time.time() - record.since > _KEPT
