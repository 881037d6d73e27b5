"""What a server leaves on disk: its runtime directory and its shared memory, each beside a file that its owner locks.

The lock ends with its holder, however that ends, and holds across containers that share the file system. A process id
does not: the same /tmp or /dev/shm can be seen from several process id namespaces.
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
    """A directory of this process for a server's files. It goes, with the shared memory that has its name, at the end.

    What servers left whose owner is gone is removed first.
    """
    for place in _places():
        _remove_stale(place)
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    with ExitStack() as locks:
        try:
            for place in _places():
                locks.enter_context(_locked(place / f"{path.name}{_LOCK}"))
            yield path
        finally:
            remove_traces(path)


def remove_traces(runtime: Path) -> None:
    """Delete a server's runtime directory, its shared memory and the lock files beside them."""
    for place in {runtime.parent, *_places()}:
        _remove(place, runtime.name)


def _places() -> tuple[Path, ...]:
    return tuple(place for place in (Path(tempfile.gettempdir()), _SHARED_MEMORY) if place.is_dir())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A file with a lock on it from the moment that it has its name."""
    descriptor, hidden = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        Path(hidden).rename(path)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(place: Path) -> None:
    """Remove what belongs to lock files that nobody holds. What has no lock file in the same place is left alone."""
    for lock in place.glob(f"{_PREFIX}*{_LOCK}"):
        name = lock.name.removesuffix(_LOCK)
        if _NAME.fullmatch(name) is None:
            continue
        with suppress(OSError):
            descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(place, name)
            finally:
                os.close(descriptor)


def _remove(place: Path, name: str) -> None:
    """Remove everything whose name begins with `name`; the lock file last, so that an interrupted removal goes on."""
    for path in sorted(place.glob(f"{name}*"), key=lambda path: path.name == f"{name}{_LOCK}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
