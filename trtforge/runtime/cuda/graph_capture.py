"""Captures computations on a GPU as CUDA graphs.

Follows PyTorch's notes on CUDA semantics (section "CUDA Graphs"): first, warm-ups run on a side stream, so that
libraries allocate their workspaces and kernels are compiled, then the capture on that stream.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from trtforge.runtime.native.compiler import kernels_wanted

Result = TypeVar("Result")
_WARM_UPS = 2


class GraphCapture:
    """Captures graphs on one GPU. They share the memory of intermediate tensors, because only one runs at a time.

    `room`: bytes of this memory that the first capture allocates at once. Otherwise each larger graph would allocate
    more, because the memory that earlier graphs freed is in blocks of their sizes.
    """

    def __init__(self, device: torch.device, room: int) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._room = room

    def __call__(
        self, compute: Callable[[], Result], rows: int, wanted: int
    ) -> tuple[Result, Callable[[int, int], None]]:
        """Capture `compute`; returns its result tensors and a function that recomputes them in place.

        Replays read the same input tensors as `compute`. The row counts only match the interface of `CallCapture`: a
        graph always computes all rows.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    compute()
        finally:  # also if memory runs out: the step is then computed again, in the same cache
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may allocate memory during the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            if self._room:  # freed at once, but stays in the pool
                torch.empty(self._room, dtype=torch.uint8, device=self._stream.device)
                self._room = 0
            result = compute()
        return result, lambda rows, wanted: graph.replay()


def graph_capture_for(device: torch.device, room: int) -> GraphCapture | None:
    """The `GraphCapture` of this device; None on a CPU, or with TRTFORGE_KERNELS=torch."""
    if device.type != "cuda" or not kernels_wanted():
        return None
    return GraphCapture(device, room)
