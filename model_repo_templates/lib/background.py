"""One thread, with a bounded queue, for work that would block other requests."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress


class Background:
    """Runs work in order of submission; at most `limit` items wait."""

    def __init__(self, limit: int) -> None:
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(limit)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> bool:
        """Run `work`, which must not raise, on the thread; False if the queue is full."""
        try:
            self._work.put_nowait(work)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """End the thread when its current work is done."""
        self._closing = True
        with suppress(queue.Full):  # a full queue wakes the thread as well
            self._work.put_nowait(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work is None or self._closing:
                return
            work()
