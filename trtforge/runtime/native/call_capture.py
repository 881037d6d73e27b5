"""Captures computations on a CPU as recorded kernel calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.recorder import Arena, NotRecordedError, recording
from trtforge.runtime.native.structures import Calls, RowCounts

Result = TypeVar("Result")


@dataclass(frozen=True)
class Replay:
    """Recorded calls. `counts`: where their arguments contain row counts; `kept`: the memory that the calls use."""

    kernels: Native
    calls: Calls
    counts: RowCounts
    kept: object

    def __call__(self, rows: int, wanted: int) -> None:
        """Compute `rows` rows; the first `wanted` of them give logits."""
        self.kernels.set_rows(self.counts, rows, wanted)
        self.kernels.replay(self.calls)


class CallCapture:
    """Records the computations of one rank. The recordings share memory for results, because one runs at a time."""

    def __init__(self, kernels: Native) -> None:
        self._kernels = kernels
        self._arena = Arena()

    def __call__(self, compute: Callable[[], Result], rows: int, wanted: int) -> tuple[Result, Replay] | None:
        """Record `compute` for `rows` rows without running it; returns its result tensors and the calls that fill them.

        A replay computes up to `rows` rows of the same input tensors; the first `wanted` of them give logits. None if
        the computation uses torch operations.
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
