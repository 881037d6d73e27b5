"""Overlap scheduling: the host begins the next step before it waits for a step's tokens, which keeps the GPU busy.

As in TensorRT-LLM (PyExecutor._executor_loop_overlap, tensorrt_llm/_torch/pyexecutor/py_executor.py).
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from trtforge.runtime.scheduling.rows import Row, context_tokens
from trtforge.runtime.scheduling.sequence import Sequence


class Deferred:
    """The rows of a step in the order of their logits, and their next tokens, int64 (rows,), on the device.

    Both are empty if a step samples nothing. `begun`: when the host began the step, in seconds of `perf_counter`.
    `restored`: number of KV blocks that were restored in this time; `context`: number of tokens in context chunks;
    `alone`: whether the step had no other tokens.
    """

    def __init__(
        self,
        rows: Rows[Row],
        tokens: Tensor | None,
        begun: float,
        restored: int = 0,
        context: int = 0,
        *,
        alone: bool = False,
    ) -> None:
        self.tokens = tokens
        self.begun, self.restored, self.context, self.alone = begun, restored, context, alone
        self._rows = rows
        self._copy = None if tokens is None else tokens.to("cpu", non_blocking=True)
        self._done: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():
            self._done = torch.cuda.Event()
            self._done.record()

    def assume(self) -> None:
        """Append placeholders for the unknown tokens, -1 - i for row i, so that the next step can be scheduled."""
        for index, row in enumerate(self._rows):
            row.sequence.tokens.append(-1 - index)

    def known(self) -> list[tuple[Row, int]]:
        """Wait for the tokens and return them with their rows; removes the placeholders that `assume` appended."""
        if self._done is not None:
            self._done.synchronize()
        for row in self._rows:
            row.sequence.tokens.pop()
        return [] if self._copy is None else list(zip(self._rows, self._copy.tolist(), strict=True))


def deferred(
    rows: Rows[Row],
    logits: Tensor | None,
    choose: Callable[[list[Sequence], Tensor], Tensor],
    begun: float,
    restored: int = 0,
) -> Deferred | None:
    """Defer the tokens of a begun step; None if the host must wait for them. `choose`: see `Sampler`."""
    if logits is None:
        return Deferred([], None, begun, restored, context_tokens(rows), alone=rows[0].count > 1)
    if not may_be_deferred(rows):
        return None
    return Deferred(rows, choose([row.sequence for row in rows], logits), begun, restored)


def may_be_deferred(rows: Rows[Row]) -> bool:
    """Whether every row samples one token that depends on its logits alone and is not the sequence's first."""
    return all(
        row.count == 1
        and row.samples
        and not row.drafts
        and row.sequence.follows_logits
        and row.start >= len(row.sequence.request.prompt)
        for row in rows
    )
