"""Errors of the Python API show their hints in a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trtforge.core.errors import ForgeError


@contextmanager
def hinted() -> Iterator[None]:
    """Add its hint, as a note, to an error that passes; Python 3.10 shows no notes."""
    try:
        yield
    except ForgeError as error:
        note = f"hint: {error.hint}"
        if sys.version_info >= (3, 11) and note not in getattr(error, "__notes__", ()):  # an engine's error comes often
            error.add_note(note)
        raise
