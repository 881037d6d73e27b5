"""The order in which processes end: the first is the cause, the others may only follow from it."""

import os
import selectors
import threading
from collections.abc import Iterable
from contextlib import suppress


class DeathOrder:
    """Notes the ends of processes on a thread of its own. Where Linux's pidfds are missing, no order is known."""

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
        """0 for the process that ended first, and so on; after all of them for one that is not known to have ended."""
        ended = tuple(self._ended)
        return ended.index(process) if process in ended else len(ended)

    def close(self) -> None:
        """Watch no more."""
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
