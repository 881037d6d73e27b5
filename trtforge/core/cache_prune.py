"""List and prune the cache: least recently used entries first, never one that a running build uses."""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.cache_entry import ARTIFACTS, Entry, lock_of, read_entries
from trtforge.core.locks import take_free_lock

DAY = 86400.0
DEFAULT_DAYS = 30.0

Remove = Callable[[Entry], bool]
"""Deletes an entry; False if a build uses it."""


@dataclass(frozen=True)
class PruneLimits:
    """Keep entries used within `older_than` days, and of those the most recent within `max_size` bytes."""

    older_than: float | None = None
    max_size: int | None = None
    everything: bool = False

    def expired(self, last_used: float, now: float) -> bool:
        """Whether an entry last used then is too old. Both in seconds since 1970."""
        return self.everything or (self.older_than is not None and now - last_used > self.older_than * DAY)


@dataclass(frozen=True)
class Pruned:
    """The removed entries, and those that were kept because they are in use."""

    removed: tuple[Entry, ...]
    in_use: tuple[Entry, ...]

    @property
    def bytes(self) -> int:
        """Total size of the removed entries."""
        return sum(entry.bytes for entry in self.removed)


def list_entries(root: Path) -> tuple[Entry, ...]:
    """Every entry of the cache below `root`, the most recently used first."""
    found = [entry for directory in _keys(root) for entry in read_entries(directory)]
    return tuple(sorted(found, key=lambda entry: (-entry.last_used, entry.key)))


def prune(entries: Iterable[Entry], limits: PruneLimits, now: float, remove: Remove) -> Pruned:
    """Remove entries, oldest first, until the rest is within `limits`. `now`: seconds since 1970."""
    oldest_first = sorted(entries, key=lambda entry: (entry.last_used, entry.key))
    total = sum(entry.bytes for entry in oldest_first)
    removed, in_use = [], []
    for entry in oldest_first:
        large = limits.max_size is not None and total > limits.max_size
        if not (large or limits.expired(entry.last_used, now)):
            continue
        if remove(entry):
            removed.append(entry)
            total -= entry.bytes
        else:
            in_use.append(entry)
    return Pruned(tuple(removed), tuple(in_use))


def remove(entry: Entry) -> bool:
    """Delete an entry of a cache; see Remove. Raises OSError if it cannot be deleted."""
    descriptor = take_free_lock(entry.lock)
    if descriptor is None:
        return False
    try:
        if entry.directory.exists():  # another process may have pruned it
            shutil.rmtree(entry.directory)
    finally:
        os.close(descriptor)
    return True


def is_free(entry: Entry) -> bool:
    """Whether `remove` would delete it."""
    descriptor = take_free_lock(entry.lock)
    if descriptor is None:
        return False
    os.close(descriptor)
    return True


def sweep(root: Path) -> None:
    """Delete unfinished entries of killed processes, and locks of keys without entries."""
    for directory in _keys(root):
        descriptor = take_free_lock(lock_of(directory))
        if descriptor is None:
            continue
        try:
            entries = {entry.directory for entry in read_entries(directory)}
            for path in set(directory.iterdir()) - entries:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            if not entries:
                directory.rmdir()
                lock_of(directory).unlink()
        finally:
            os.close(descriptor)


def _keys(root: Path) -> tuple[Path, ...]:
    """The directories of the keys. Raises OSError for a cache that this user may not read."""
    try:
        return tuple(path for path in sorted((root / ARTIFACTS).iterdir()) if path.is_dir())
    except FileNotFoundError:
        return ()
