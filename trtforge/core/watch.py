"""Detect files that change while they are read."""

import os
from collections.abc import Iterable
from pathlib import Path

from trtforge.core.errors import ForgeError

_Stamp = tuple[int, int, int, int]


class Watch:
    """The state of all files below a directory before any is opened. Symbolic links are followed.

    A file that was written or replaced has another size, modification time or inode.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._stamps = {path: _stamp(path) for path in (*directory.iterdir(), *directory.glob("*/*"))}
        except OSError:  # opening the directory will report the error
            self._stamps = {}

    def require_unchanged(self, paths: Iterable[Path]) -> None:
        """Raise ForgeError naming the first of `paths` that changed or disappeared."""
        for path in paths:
            before, now = self._stamps.get(path), _stamp(path)
            if before is None or now != before:
                raise ForgeError(
                    f"{path} {'changed' if now else 'disappeared'} while it was read",
                    hint="Make sure that nothing writes to the source, then run again; nothing was published.",
                )


def _stamp(path: Path) -> _Stamp | None:
    """Device, inode, size and modification time in ns; None if the file does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
