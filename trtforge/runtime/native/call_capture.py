"""Captures computations on a CPU as recorded calls of kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.recorder import Arena, NotRecordedError, recording
from trtforge.runtime.native.structures import Calls, RowCounts

Result = TypeVar("Result")


@dataclass(frozen=True)
class Replay:
    """Recorded calls, where they say how many rows they compute, and the memory that they read and write."""

    kernels: Native
    calls: Calls
    counts: RowCounts
    kept: object

    def __call__(self, rows: int, wanted: int) -> None:
        """Compute so many rows, the first `wanted` of which give logits."""
        self.kernels.set_rows(self.counts, rows, wanted)
        self.kernels.replay(self.calls)


class CallCapture:
    """The recordings of one rank. They share memory for their results, because one runs at a time."""

    def __init__(self, kernels: Native) -> None:
        self._kernels = kernels
        self._arena = Arena()

    def __call__(self, compute: Callable[[], Result], rows: int, wanted: int) -> tuple[Result, Replay] | None:
        """What `compute` gives of so many rows, and what computes as many of them, or fewer, from what it read.

        None if torch takes part. Nothing is computed yet.
        """
        self._arena.restart()
        try:
            with recording(self._arena) as recorder:
                result = compute()
            calls, kept = recorder.calls()
            counts = recorder.row_counts(calls, rows, wanted)
        except NotRecordedError:
            return None
        return result, Replay(self._kernels, calls, counts, kept)
