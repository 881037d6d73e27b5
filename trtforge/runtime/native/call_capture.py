"""Captures computations on a CPU as recorded calls of kernels."""

from collections.abc import Callable
from typing import TypeVar

from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.recorder import Arena, NotRecordedError, recording

Result = TypeVar("Result")


class CallCapture:
    """The recordings of one rank. They share memory for their results, because one runs at a time."""

    def __init__(self, kernels: Native) -> None:
        self._kernels = kernels
        self._arena = Arena()

    def __call__(
        self, compute: Callable[[], Result], rows: int, wanted: int
    ) -> tuple[Result, Callable[[int, int], None]] | None:
        """What `compute` gives of so many rows, and what computes as many of them, or fewer, from what it read.

        None if torch takes part. Nothing is computed yet.
        """
        self._arena.restart()
        try:
            with recording(self._arena, computes=False) as recorder:
                result = compute()
        except NotRecordedError:
            return None
        calls, kept = recorder.calls()
        counts = recorder.row_counts(calls, rows, wanted)

        def replay(rows: int, wanted: int, kept: object = kept) -> None:
            self._kernels.set_rows(counts, rows, wanted)
            self._kernels.replay(calls)

        return result, replay
