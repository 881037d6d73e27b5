"""A server's runtime directory and shared memory, each with a lock file that its owner holds."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trtforge.machine.owned_files import owned, remove_owned, remove_ownerless

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "trtforge-serve-"
_NAME = re.compile(rf"{_PREFIX}\d+-\w{{8}}")


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """A directory for a server's files, removed at the end together with the shared memory of the same name.

    Files of servers without a living owner are removed first.
    """
    for parent in _parents():
        remove_ownerless(parent, _PREFIX, _NAME)
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    with ExitStack() as locks:
        try:
            for parent in _parents():
                locks.enter_context(owned(parent / path.name))
            yield path
        finally:
            remove_traces(path)


def remove_traces(runtime: Path) -> None:
    """Delete a server's runtime directory, its shared memory and the lock files beside them."""
    for parent in {runtime.parent, *_parents()}:
        remove_owned(parent / runtime.name)


def _parents() -> tuple[Path, ...]:
    return tuple(parent for parent in (Path(tempfile.gettempdir()), _SHARED_MEMORY) if parent.is_dir())
