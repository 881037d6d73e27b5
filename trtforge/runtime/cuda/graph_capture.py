"""Captures computations on a GPU as CUDA graphs.

As PyTorch's notes on CUDA semantics ask (section "CUDA Graphs"): warm-ups on another stream first, so that libraries
have their workspaces and kernels are compiled, then the capture on that stream.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from trtforge.runtime.native.compiler import kernels_wanted

Result = TypeVar("Result")
_WARM_UPS = 2


class GraphCapture:
    """The graphs of one GPU. They share memory for what is between inputs and results, because one runs at a time.

    `room`: bytes of this memory that the first capture takes at once. Otherwise each larger graph would take more,
    because what earlier ones left lies in pieces of their sizes.
    """

    def __init__(self, device: torch.device, room: int) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._room = room

    def __call__(
        self, compute: Callable[[], Result], rows: int, wanted: int
    ) -> tuple[Result, Callable[[int, int], None]]:
        """The tensors that `compute` gives of so many rows, and what computes these again, from what it read."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            if self._room:  # freed again, it stays the graphs' memory
                torch.empty(self._room, dtype=torch.uint8, device=self._stream.device)
                self._room = 0
            result = compute()
        return result, lambda rows, wanted: graph.replay()


def graph_capture_for(device: torch.device, room: int) -> GraphCapture | None:
    """What captures graphs on this device, see `GraphCapture`; None on a CPU, or with TRTFORGE_KERNELS=torch."""
    if device.type != "cuda" or not kernels_wanted():
        return None
    return GraphCapture(device, room)
