"""Bounds the log of a long-running server by emptying it when it is full."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 64 * 2**20


def emptied(log: Path, kept: Path | None = None, most: int = MOST_BYTES) -> bool:
    """Empty a log of more than `most` bytes, after copying it to `kept`; returns whether it was emptied.

    It is not renamed, because several processes have it open; they append, so they continue at the new end. Text
    written between copying and truncation is lost. If the disk is full, no copy is kept.
    """
    try:
        if log.stat().st_size <= most:
            return False
        if kept is not None:
            try:
                shutil.copy(log, kept)
            except OSError:
                with suppress(OSError):
                    kept.unlink(missing_ok=True)
        os.truncate(log, 0)
    except OSError:
        return False
    return True
