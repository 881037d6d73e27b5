"""Bounds the log of a server that runs for long: one that is full is emptied."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 64 * 2**20


def emptied(log: Path, kept: Path | None = None, most: int = MOST_BYTES) -> bool:
    """Empty a log of more than `most` bytes, after copying it to `kept`; whether it was emptied.

    It is not renamed, because several processes hold it open. They append, so that they go on at the new end; what they
    write between copy and truncation is lost. A disk without room gets no copy.
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
