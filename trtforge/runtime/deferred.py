"""A step whose tokens the host does not wait for: it begins the next one first, so that a GPU is never without work.

As TensorRT-LLM's overlap scheduler (PyExecutor._executor_loop_overlap, tensorrt_llm/_torch/pyexecutor/py_executor.py).
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from trtforge.runtime.scheduling.rows import Row, context_tokens
from trtforge.runtime.scheduling.sequence import Sequence


class Deferred:
    """The rows of a step in the order of their logits, and their next tokens, int64 (rows,), on the device.

    No rows and no tokens where a step samples nothing. `begun`: when the host did, in seconds of `perf_counter`.
    `context`: tokens of chunks; `alone`: whether the step had no others.
    """

    def __init__(
        self, rows: Rows[Row], tokens: Tensor | None, begun: float, context: int = 0, *, alone: bool = False
    ) -> None:
        self.tokens = tokens
        self.begun, self.context, self.alone = begun, context, alone
        self._rows = rows
        self._copy = None if tokens is None else tokens.to("cpu", non_blocking=True)
        self._done: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():
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
        return [] if self._copy is None else list(zip(self._rows, self._copy.tolist(), strict=True))


def deferred(
    rows: Rows[Row], logits: Tensor | None, choose: Callable[[list[Sequence], Tensor], Tensor], begun: float
) -> Deferred | None:
    """A step that was begun; None if the host must wait for its tokens. `choose`: see `Sampler`."""
    if logits is None:
        return Deferred([], None, begun, context_tokens(rows), alone=rows[0].count > 1)
    if not may_be_deferred(rows):
        return None
    return Deferred(rows, choose([row.sequence for row in rows], logits), begun)


def may_be_deferred(rows: Rows[Row]) -> bool:
    """Whether all rows sample one token each that follows from its logits alone, none for the first time."""
    return all(
        row.count == 1
        and row.samples
        and not row.drafts
        and row.sequence.follows_logits
        and row.start >= len(row.sequence.request.prompt)
        for row in rows
    )
