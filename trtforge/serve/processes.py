"""What a server leaves behind: its runtime directory and its shared memory."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "trtforge-serve-"


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """A directory of this process for a server's files. It goes, with the shared memory that has its name, at the end.

    Those of processes that were killed before they could do so go first.
    """
    _remove_stale()
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        remove_shared_memory(path.name)


def remove_shared_memory(prefix: str) -> None:
    """Delete the shared memory that a server killed early left; `prefix` as it was told."""
    for path in _SHARED_MEMORY.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def _remove_stale() -> None:
    for path in (*Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"), *_SHARED_MEMORY.glob(f"{_PREFIX}*")):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not owner.isdecimal() or Path("/proc", owner).exists():
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
