"""Captures computations on a CPU as recorded calls of kernels."""

from collections.abc import Callable
from typing import TypeVar

from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.recorder import Arena, recording

Result = TypeVar("Result")


class CallCapture:
    """The recordings of one rank. They share memory for their results, because one runs at a time."""

    def __init__(self, kernels: Native) -> None:
        self._kernels = kernels
        self._arena = Arena()

    def __call__(self, compute: Callable[[], Result]) -> tuple[Result, Callable[[], None]] | None:
        """What `compute` gives, and what computes it again from the inputs that it read; None if torch takes part."""
        self._arena.restart()
        with recording(self._arena) as recorder:
            result = compute()
        if not recorder.complete:
            return None
        calls, kept = recorder.calls()

        def replay(kept: object = kept) -> None:
            self._kernels.replay(calls)

        return result, replay
