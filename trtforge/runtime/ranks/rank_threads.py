"""Threads that work together, one task each at a time: ranks of an engine within one process."""

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")
_PATIENCE = 30.0  # seconds that members get to notice that another has failed


class Task(NamedTuple, Generic[T]):
    """What a member does. `leave` lets go of those that wait for it: called where it failed, or never began."""

    work: Callable[[], T]
    leave: Callable[[], None] = lambda: None


class RankThreads(Generic[T]):
    """`size` threads, of which as many as share the processor compute with `threads` threads of torch's each.

    `close` waits for their end: a thread that comes back from torch's C++ while the interpreter ends aborts the
    process (https://github.com/pytorch/pytorch/issues/38228). They are daemons for the case that one waits for ever,
    as between GPUs one may for another that failed: the process then ends while it waits.
    """

    def __init__(self, size: int, threads: int) -> None:
        self._inboxes: list[SimpleQueue[Task[T] | None]] = [SimpleQueue() for _ in range(size)]
        self._done: SimpleQueue[tuple[int, T | None, BaseException | None]] = SimpleQueue()
        self._failed = False
        self._threads = [Thread(target=self._work, args=(member, threads), daemon=True) for member in range(size)]
        for thread in self._threads:
            thread.start()

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        """Results of tasks run at once, in order. The first error is raised; `run` must not be called after that."""
        begun = 0
        results: dict[int, T] = {}
        try:
            for inbox, task in zip(self._inboxes, tasks, strict=False):
                begun += 1
                inbox.put(task)
            for _ in tasks:
                member, result, error = self._done.get()
                if error is not None:
                    self._failed = True
                    raise error
                results[member] = result  # type: ignore[assignment]
        except BaseException:  # an interruption too, anywhere
            self._failed |= begun < len(tasks)
            for task in tasks[begun:]:
                task.leave()
            raise
        return [results[member] for member in range(len(tasks))]

    def close(self) -> None:
        """Wait for the end of the threads: for what they still compute, or 30 seconds where one has failed."""
        for inbox in self._inboxes:
            inbox.put(None)
        deadline = time.monotonic() + _PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()) if self._failed else None)

    def _work(self, member: int, threads: int) -> None:
        torch.set_num_threads(threads)
        while (task := self._inboxes[member].get()) is not None:
            with torch.inference_mode():
                try:
                    self._done.put((member, task.work(), None))
                except BaseException as error:  # told to whoever waits, before the errors that it causes
                    self._done.put((member, None, error))
                    task.leave()
