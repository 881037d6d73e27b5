"""Bounds the bytes of request bodies that a server holds at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HeldBytes:
    """Counts the bytes of bodies as they arrive: what clients declare and do not send takes no memory."""

    def __init__(self, limit: int, refusal: Callable[[], Exception]) -> None:
        """`refusal`: makes a new error for each request that would exceed the limit."""
        self._limit = limit
        self._refusal = refusal
        self._held = 0

    @contextmanager
    def request(self) -> Iterator[Callable[[int], None]]:
        """A function for the size of each piece of a request's body; at the end of the block none is held any more."""
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
