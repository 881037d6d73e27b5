"""Files in shared directories that belong to a running process, which locks a file beside them.

A lock ends with its holder, even on SIGKILL, and works across containers that share the file system. Process ids would
not work, as several process id namespaces can share /tmp or /dev/shm.
"""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = ".lock"


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """Own all files beside `path` whose names begin with its name, within the block. Raises OSError.

    The lock file is locked before it gets its name.
    """
    descriptor, hidden = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        Path(hidden).rename(_lock_of(path))
        yield
    finally:
        os.close(descriptor)


def remove_ownerless(parent: Path, prefix: str, names: re.Pattern[str]) -> None:
    """Remove the files in `parent` whose owners have ended. `names`: pattern of `owned` paths, which begin with
    `prefix`.

    Files without a lock file are kept.
    """
    for lock in parent.glob(f"{prefix}*{_LOCK}"):
        path = lock.with_name(lock.name.removesuffix(_LOCK))
        if names.fullmatch(path.name) is None:
            continue
        with suppress(OSError):
            descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_owned(path)
            finally:
                os.close(descriptor)


def remove_owned(path: Path) -> None:
    """Remove the files of `owned`, the lock file last, so that an interrupted removal can be repeated."""
    for found in sorted(path.parent.glob(f"{path.name}*"), key=lambda found: found == _lock_of(path)):
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found, ignore_errors=True)
        else:
            with suppress(OSError):
                found.unlink()


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}{_LOCK}")
