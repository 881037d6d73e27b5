"""The latest things that one thread says, for another one that asks from time to time."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Recent(Generic[Item]):
    """At most `count` items that nobody has taken yet; of more the oldest are dropped. For any threads."""

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
        """Whether there is a newest item, and `change`, which may change it, says so."""
        with self._changed:
            return bool(self._items) and change(self._items[-1])

    def take(self, timeout: float | None) -> list[Item]:
        """All items, the oldest first. Without any wait for one, or for `close`, but at most `timeout` seconds.

        None: for any time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed, timeout)
            found = list(self._items)
            self._items.clear()
            return found

    def close(self) -> None:
        """Wait no more. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
