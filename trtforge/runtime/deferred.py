"""A step whose tokens the host does not wait for: it begins the next one first, so that a GPU is never without work.

As TensorRT-LLM's overlap scheduler (PyExecutor._executor_loop_overlap, tensorrt_llm/_torch/pyexecutor/py_executor.py).
"""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from trtforge.runtime.scheduling.rows import Row


def may_be_deferred(rows: Rows[Row]) -> bool:
    """Whether all of a step's rows sample tokens that follow from their logits alone, none for the first time."""
    return all(
        row.samples and row.sequence.follows_logits and row.start >= len(row.sequence.request.prompt) for row in rows
    )


class Deferred:
    """The rows of a step in the order of their logits, and their next tokens, int64 (rows,), on the device.

    `begun`: when the host did, in seconds of `perf_counter`.
    """

    def __init__(self, rows: Rows[Row], tokens: Tensor, begun: float) -> None:
        self.tokens = tokens
        self.begun = begun
        self._rows = rows
        self._copy = tokens.to("cpu", non_blocking=True)
        self._done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def assume(self) -> None:
        """Let the next step be scheduled as if the tokens were known: -1 - i stands for that of row i."""
        for index, row in enumerate(self._rows):
            row.sequence.tokens.append(-1 - index)

    def known(self) -> list[tuple[Row, int]]:
        """The rows and their tokens, once these are known; what `assume` appended is taken away again."""
        if self._done is not None:
            self._done.synchronize()
        for row in self._rows:
            row.sequence.tokens.pop()
        return list(zip(self._rows, self._copy.tolist(), strict=True))
