"""A bounded queue of the latest items of one thread for another thread that polls."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Recent(Generic[Item]):
    """At most `count` items that were not taken yet; the oldest are dropped. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._items: deque[Item] = deque(maxlen=count)
        self._closed = False

    def add(self, item: Item) -> None:
        """Add an item, the newest one."""
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def change_newest(self, change: Callable[[Item], bool]) -> bool:
        """Call `change` with the newest item, which it may modify; returns its result, False without an item."""
        with self._changed:
            return bool(self._items) and change(self._items[-1])

    def take(self, timeout: float | None) -> list[Item]:
        """Take all items, the oldest first. If there are none, wait for one or for `close`, at most `timeout` seconds.

        None: no limit.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed, timeout)
            found = list(self._items)
            self._items.clear()
            return found

    def close(self) -> None:
        """End waiting from now on. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
