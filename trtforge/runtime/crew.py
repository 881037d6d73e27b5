"""Threads that work together, one task each at a time: ranks of an engine within one process."""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
_Task = Callable[[], T]


class Crew(Generic[T]):
    """`size` threads, of which as many as share the processor compute with `threads` threads of torch's each.

    They are daemons: where one fails, others may wait for it forever, and neither an error nor Ctrl-C waits for those.
    """

    def __init__(self, size: int, threads: int) -> None:
        self._inboxes: list[SimpleQueue[_Task[T] | None]] = [SimpleQueue() for _ in range(size)]
        self._done: SimpleQueue[tuple[int, T | None, BaseException | None]] = SimpleQueue()
        for member in range(size):
            Thread(target=self._work, args=(member, threads), daemon=True).start()

    def run(self, tasks: Sequence[_Task[T]]) -> list[T]:
        """The results of tasks that run at once, in their order; the first error is raised, and ends the crew's use."""
        for inbox, task in zip(self._inboxes, tasks, strict=False):
            inbox.put(task)
        results: dict[int, T] = {}
        for _ in tasks:
            member, result, error = self._done.get()
            if error is not None:
                raise error
            results[member] = result  # type: ignore[assignment]
        return [results[member] for member in range(len(tasks))]

    def close(self) -> None:
        """End the threads when they are done."""
        for inbox in self._inboxes:
            inbox.put(None)

    def _work(self, member: int, threads: int) -> None:
        torch.set_num_threads(threads)
        while (task := self._inboxes[member].get()) is not None:
            try:
                with torch.inference_mode():
                    self._done.put((member, task(), None))
            except BaseException as error:  # told to whoever waits
                self._done.put((member, None, error))
