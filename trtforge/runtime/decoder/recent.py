"""A cache of the most recently used values."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """At most `most` values by key; the least recently used one is dropped for a new one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[Key, Value] = {}  # the least recently used first

    def __iter__(self) -> Iterator[Key]:
        return iter(tuple(self._values))

    def get(self, key: Key) -> Value | None:
        """The value of a key; None if there is none. Counts as a use."""
        value = self._values.pop(key, None)
        if value is not None:
            self._values[key] = value
        return value

    def put(self, key: Key, value: Value) -> None:
        """Keep a value."""
        self.drop(key)
        self._values[key] = value
        if len(self._values) > self._most:
            self.drop(next(iter(self._values)))

    def drop(self, key: Key) -> None:
        """Forget the value of a key, if there is one."""
        self._values.pop(key, None)

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()
