"""Bounds the total bytes of request bodies in a server."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HeldBytes:
    """Counts the bytes of bodies as they arrive: declared but unsent bytes do not count."""

    def __init__(self, limit: int, refusal: Callable[[], Exception]) -> None:
        """`refusal`: creates the error for a request that would exceed the limit."""
        self._limit = limit
        self._refusal = refusal
        self._held = 0

    @contextmanager
    def request(self) -> Iterator[Callable[[int], None]]:
        """Yields a function to call with the size of each piece of a body; the end of the block releases all of it."""
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            if self._held + size > self._limit:
                raise self._refusal()
            self._held += size
            held += size

        try:
            yield hold
        finally:
            self._held -= held
