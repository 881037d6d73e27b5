"""Advisory file locks between processes, released when a process is killed (flock: local file systems and NFS)."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Waiting = Callable[[], None]
"""Called once if another process has the lock, before this one waits for it."""


def take_lock(path: Path, *, shared: bool = False, waiting: Waiting = lambda: None) -> int:
    """A descriptor that holds the lock of the file at `path` until it is closed; the file is never an unlinked one.

    Raises OSError if locking is not possible, for example in a directory without write permission.
    """
    while True:
        descriptor = _open(path)
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
    """Hold the lock file at `path` for the block, as `take_lock` does, then delete it."""
    descriptor = take_lock(path, waiting=waiting)
    try:
        yield
    finally:
        with suppress(OSError):  # it may be another user's in a directory with the sticky bit
            path.unlink()
        os.close(descriptor)


def take_free_lock(path: Path) -> int | None:
    """Like `take_lock`, exclusive, but None if another process holds the lock."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(descriptor, path):
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def is_held(path: Path) -> bool:
    """Whether any process holds the exclusive lock of the file at `path`; False if there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def release_shared(descriptor: int) -> bool:
    """Release a shared lock; returns whether no other process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _open(path: Path) -> int:
    """A descriptor of the lock file, which is created if it does not exist. Locking does not need write permission."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:  # the file is another user's, or the disk is read-only
        try:
            return os.open(path, os.O_RDONLY)
        except OSError:
            raise error from None


def _flock(descriptor: int, mode: int, waiting: Waiting) -> None:
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(descriptor, mode)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file still has this name: the previous holder of the lock may have unlinked it."""
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
