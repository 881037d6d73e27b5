"""Files that must stay as they are while they are read: a changed one is named."""

import os
from collections.abc import Iterable
from pathlib import Path

from trtforge.core.errors import ForgeError

_Stamp = tuple[int, int, int, int]


class Watch:
    """What the files of a directory were like before the first of them was opened. Symbolic links are followed.

    A file that was written or replaced has another size, time of modification or inode.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._stamps = {path: _stamp(path) for path in directory.iterdir()}
        except OSError:  # whoever opens the directory says what is wrong with it
            self._stamps = {}

    def require_unchanged(self, paths: Iterable[Path]) -> None:
        """Raises ForgeError naming the first of `paths` that is not what it was, or is gone."""
        for path in paths:
            before, now = self._stamps.get(path), _stamp(path)
            if before is None or now != before:
                raise ForgeError(
                    f"{path} {'changed' if now else 'disappeared'} while it was read",
                    hint="Let nothing else write the source, then run again; nothing was published.",
                )


def _stamp(path: Path) -> _Stamp | None:
    """Device, inode, size and time of the last write in ns; None where there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
