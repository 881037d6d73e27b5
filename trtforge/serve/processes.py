"""A server's files: its runtime directory and its shared memory, each beside a file that its owner locks.

A lock ends with its holder, even on SIGKILL, and works across containers that share the file system. A process id does
not: several process id namespaces can share /tmp or /dev/shm.
"""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "trtforge-serve-"
_LOCK = ".lock"
_NAME = re.compile(rf"{_PREFIX}\d+-\w{{8}}")


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """A directory for a server's files, removed at the end together with the shared memory of the same name.

    Files of servers whose owner is gone are removed first.
    """
    for parent in _parents():
        _remove_stale(parent)
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    with ExitStack() as locks:
        try:
            for parent in _parents():
                locks.enter_context(_locked(parent / f"{path.name}{_LOCK}"))
            yield path
        finally:
            remove_traces(path)


def remove_traces(runtime: Path) -> None:
    """Delete a server's runtime directory, its shared memory and the lock files beside them."""
    for parent in {runtime.parent, *_parents()}:
        _remove(parent, runtime.name)


def _parents() -> tuple[Path, ...]:
    return tuple(parent for parent in (Path(tempfile.gettempdir()), _SHARED_MEMORY) if parent.is_dir())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Create a file that is locked before it gets its name, and hold the lock."""
    descriptor, hidden = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        Path(hidden).rename(path)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(parent: Path) -> None:
    """Remove the files of servers whose lock file nobody holds; files without a lock file in `parent` stay."""
    for lock in parent.glob(f"{_PREFIX}*{_LOCK}"):
        name = lock.name.removesuffix(_LOCK)
        if _NAME.fullmatch(name) is None:
            continue
        with suppress(OSError):
            descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(parent, name)
            finally:
                os.close(descriptor)


def _remove(parent: Path, name: str) -> None:
    """Remove everything whose name begins with `name`, the lock file last: an interrupted removal can be repeated."""
    for path in sorted(parent.glob(f"{name}*"), key=lambda path: path.name == f"{name}{_LOCK}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
