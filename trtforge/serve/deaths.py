"""The order in which processes end: the first end is the cause, later ones may be its consequences."""

import os
import selectors
import threading
from collections.abc import Iterable
from contextlib import suppress


class DeathOrder:
    """Records the order in which processes end, on its own thread. Without pidfds (Linux) the order is unknown."""

    def __init__(self, processes: Iterable[int]) -> None:
        self._ended: list[int] = []
        self._selector = selectors.DefaultSelector()
        for process in processes:
            with suppress(AttributeError, OSError):
                descriptor = os.pidfd_open(process)
                self._selector.register(descriptor, selectors.EVENT_READ, process)
        self._wake, ours = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._end = ours
        threading.Thread(target=self._run, name="death-order", daemon=True).start()

    def place(self, process: int) -> int:
        """Position in that order, from 0; processes without a known end come last."""
        ended = tuple(self._ended)
        return ended.index(process) if process in ended else len(ended)

    def close(self) -> None:
        """Stop watching."""
        with suppress(OSError):
            os.close(self._end)

    def _run(self) -> None:
        running = True
        while running:
            for key, _ in self._selector.select():
                if key.data is None:
                    running = False
                else:
                    self._ended.append(key.data)
                    self._selector.unregister(key.fileobj)
                    os.close(key.fd)
        for key in tuple(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
