"""Adds hints to the tracebacks of the Python API's errors."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trtforge.core.errors import ForgeError


@contextmanager
def hinted() -> Iterator[None]:
    """Add an error's hint to it as a note; Python 3.10 does not show notes."""
    try:
        yield
    except ForgeError as error:
        note = f"hint: {error.hint}"
        if sys.version_info >= (3, 11) and note not in getattr(error, "__notes__", ()):  # it may pass several times
            error.add_note(note)
        raise
