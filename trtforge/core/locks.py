"""Advisory locks between processes, on files: whoever is killed holds none. (flock: local file systems, and NFS.)"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Waiting = Callable[[], None]
"""Called once if another process has the lock, before this one waits for it."""


def take_lock(path: Path, *, shared: bool = False, waiting: Waiting = lambda: None) -> int:
    """A descriptor that holds the lock file at `path`, until it is closed. Never one of an unlinked file.

    Raises OSError where no lock can be had, for example below a directory that cannot be written.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, waiting)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextmanager
def locked_by(path: Path, *, waiting: Waiting = lambda: None) -> Iterator[None]:
    """Hold the lock file at `path`, as `take_lock` does, for the block; it is deleted then."""
    descriptor = take_lock(path, waiting=waiting)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def take_free_lock(path: Path) -> int | None:
    """As `take_lock` for an exclusive one; None where another process has it now."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(descriptor, path):
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _flock(descriptor: int, mode: int, waiting: Waiting) -> None:
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(descriptor, mode)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that has the name: who held the lock may have unlinked it."""
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
