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

    def __call__(self, compute: Callable[[], Result]) -> tuple[Result, Callable[[], None]] | None:
        """Computes; what `compute` gives, and what computes it again from the inputs that it read.

        None if torch takes part.
        """
        self._arena.restart()
        try:
            with recording(self._arena, computes=False) as recorder:
                result = compute()
        except NotRecordedError:
            return None
        calls, kept = recorder.calls()

        def replay(kept: object = kept) -> None:
            self._kernels.replay(calls)

        replay()
        return result, replay
