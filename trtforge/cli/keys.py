"""What is typed on the terminal while an answer is written: not shown then, but read by the next prompt."""

import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

_LOCAL_FLAGS = 3  # in the list of tcgetattr


class Keys:
    """The terminal at a file descriptor, as it was found."""

    def __init__(self, descriptor: int) -> None:
        """Raises termios.error if it is no terminal."""
        self._descriptor = descriptor
        self._found = termios.tcgetattr(descriptor)

    @classmethod
    def of(cls, stream: IO[str]) -> "Keys | None":
        """Those of a stream; None if it is no terminal."""
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
        """Make the terminal what it was found as."""
        termios.tcsetattr(self._descriptor, termios.TCSANOW, self._found)
