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
    """Recorded calls. `counts`: the arguments that hold numbers of rows; `kept`: the memory that the calls use."""

    kernels: Native
    calls: Calls
    counts: RowCounts
    kept: object

    def __call__(self, rows: int, wanted: int) -> None:
        """Compute `rows` rows; the first `wanted` of them give logits."""
        self.kernels.set_rows(self.counts, rows, wanted)
        self.kernels.replay(self.calls)


class CallCapture:
    """The recordings of one rank. They share memory for their results, because one runs at a time."""

    def __init__(self, kernels: Native) -> None:
        self._kernels = kernels
        self._arena = Arena()

    def __call__(self, compute: Callable[[], Result], rows: int, wanted: int) -> tuple[Result, Replay] | None:
        """Record `compute` for `rows` rows without computing it: its result tensors, and the calls that fill them.

        A replay takes up to `rows` rows from the same input tensors; the first `wanted` of them give logits. None if
        torch takes part in the computation.
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
