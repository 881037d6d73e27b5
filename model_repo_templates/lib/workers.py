"""Threads that serve requests beside one another. They never hold up the end of the process."""

import queue
import threading
from collections.abc import Callable


class Workers:
    """Up to `limit` daemon threads, started when needed; more work waits in order of arrival."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._unfinished = 0

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` on a thread; it must not raise."""
        with self._lock:
            self._unfinished += 1
            if self._unfinished > self._started and self._started < self._limit:
                self._started += 1
                threading.Thread(target=self._run, name=f"worker-{self._started}", daemon=True).start()
        self._work.put(work)

    def _run(self) -> None:
        while True:
            self._work.get()()
            with self._lock:
                self._unfinished -= 1
