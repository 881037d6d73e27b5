"""Runs the ranks of an engine as threads of one process, one task per rank at a time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
_FAILURE_TIMEOUT = 30.0  # seconds that the other threads have to end after one failed


@dataclass(frozen=True)
class Task(Generic[T]):
    """Work of one thread. `leave` releases the threads that wait for it; called if `work` failed or never began."""

    work: Callable[[], T]
    leave: Callable[[], None] = lambda: None


class RankThreads(Generic[T]):
    """`size` threads, each of which computes with `threads` torch threads.

    `close` waits for them: a thread that returns from torch's C++ while the interpreter ends aborts the process
    (https://github.com/pytorch/pytorch/issues/38228). They are daemon threads because a rank may wait forever in a
    GPU collective for one that failed, which must not keep the process from ending.
    """

    def __init__(self, size: int, threads: int) -> None:
        self._inboxes: list[SimpleQueue[Task[T] | None]] = [SimpleQueue() for _ in range(size)]
        self._done: SimpleQueue[tuple[int, T | None, BaseException | None]] = SimpleQueue()
        self._failed = False
        self._threads = [Thread(target=self._work, args=(member, threads), daemon=True) for member in range(size)]
        for thread in self._threads:
            thread.start()

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        """Run tasks concurrently; results are in order. Raises the first error; `run` must not be called after that."""
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
        except BaseException:  # KeyboardInterrupt too, at any point
            self._failed |= begun < len(tasks)
            for task in tasks[begun:]:
                task.leave()
            raise
        return [results[member] for member in range(len(tasks))]

    def close(self) -> None:
        """Wait until the threads have finished their tasks, at most 30 seconds if one has failed."""
        for inbox in self._inboxes:
            inbox.put(None)
        deadline = time.monotonic() + _FAILURE_TIMEOUT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()) if self._failed else None)

    def _work(self, member: int, threads: int) -> None:
        torch.set_num_threads(threads)
        while (task := self._inboxes[member].get()) is not None:
            with torch.inference_mode():
                try:
                    self._done.put((member, task.work(), None))
                except BaseException as error:  # reported before the errors that it causes in other threads
                    self._done.put((member, None, error))
                    task.leave()
