"""Hides what is typed while an answer is printed; the next prompt reads it."""

import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

_LOCAL_FLAGS = 3  # in the list of tcgetattr


class Keys:
    """A terminal and its original settings."""

    def __init__(self, descriptor: int) -> None:
        """Raises termios.error if it is no terminal."""
        self._descriptor = descriptor
        self._found = termios.tcgetattr(descriptor)

    @classmethod
    def of(cls, stream: IO[str]) -> "Keys | None":
        """The terminal of a stream; None if the stream is not a terminal."""
        return cls(stream.fileno()) if stream.isatty() else None

    @contextmanager
    def silent(self) -> Iterator[None]:
        """No echo; Ctrl-C interrupts as usual."""
        silent = list(self._found)
        silent[_LOCAL_FLAGS] &= ~termios.ECHO
        try:
            termios.tcsetattr(self._descriptor, termios.TCSANOW, silent)
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Restore the original settings."""
        termios.tcsetattr(self._descriptor, termios.TCSANOW, self._found)
