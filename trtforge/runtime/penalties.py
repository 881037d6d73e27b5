"""Penalties of tokens that occurred. Only their logits are read and written: hundreds of a vocabulary's 128,000."""

from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trtforge.runtime.cuda.pinned import sent, sent_column
from trtforge.runtime.scheduling.sequence import Sequence
from trtforge.runtime.scheduling.virtual_tokens import VIRTUAL

LARGEST = torch.finfo(torch.float32).max
"""To which changed logits are clamped: the softmax of an infinite one is not a number."""


class Penalties:
    """Repetition, presence and frequency penalties. Keeps what occurred in unfinished sequences; call `forget`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._occurred: dict[Sequence, _Occurrences] = {}

    def apply(self, rows: Several[Sequence], logits: Tensor, places: Several[int]) -> None:
        """Change the logits of sequences, which are these places of (any, vocabulary), as penaltyKernels.cu does."""
        occurred = [self._occurrences(row) for row in rows]
        if not all(each.count for each in occurred):  # prompts of rows of a table alone
            some = [index for index, each in enumerate(occurred) if each.count]
            if some:
                self.apply([rows[index] for index in some], logits, [places[index] for index in some])
            return
        most = max(each.count for each in occurred)
        tokens = np.stack([_lengthened(each.tokens[: each.count], most) for each in occurred])
        counts = sent(np.stack([_lengthened(each.counts[: each.count], most) for each in occurred]), self._device)
        at = sent_column(places, self._device), sent(tokens, self._device)
        params = [row.request.sampling for row in rows]
        changed = logits[at]
        repetition = sent_column([p.repetition_penalty for p in params], self._device)
        changed = torch.where(changed < 0, changed * repetition, changed / repetition)
        changed -= sent_column([p.presence_penalty for p in params], self._device) * (counts > 0)
        changed -= counts * sent_column([p.frequency_penalty for p in params], self._device)
        logits[at] = changed.clamp_(max=LARGEST)

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a finished sequence."""
        self._occurred.pop(sequence, None)

    def _occurrences(self, row: Sequence) -> "_Occurrences":
        """Counted on from the last time, unless it got the tokens of another one, as in a beam search."""
        found = self._occurred.get(row)
        if found is None or found.of is not row.tokens:
            ignored = min(row.request.sampling.prompt_ignore_length, len(row.request.prompt))
            found = self._occurred[row] = _Occurrences(row.tokens, row.limit, ignored)
        found.count_new()
        return found


class _Occurrences:
    """The different tokens of a list that grows to `limit`, and how often each occurs: the first `count` of both.

    The first `ignored` tokens of the list are there, but count as none.
    """

    def __init__(self, of: list[int], limit: int, ignored: int) -> None:
        self.of = of
        self._ignored = ignored
        self.tokens = np.empty(limit, dtype=np.int64)
        self.counts = np.zeros(limit, dtype=np.float32)
        self.count = 0
        self._places: dict[int, int] = {}
        self._counted = 0

    def count_new(self) -> None:
        """Count the tokens that were added, but not rows of a prompt table, which have no logit."""
        for index, token in enumerate(self.of[self._counted :], self._counted):
            if token >= VIRTUAL:
                continue
            place = self._places.setdefault(token, self.count)
            if place == self.count:
                self.tokens[place] = token
                self.count += 1
            self.counts[place] += index >= self._ignored
        self._counted = len(self.of)


def _lengthened(values: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """The last one repeated: a token that is there twice gets the same logit twice."""
    return np.pad(values, (0, length - len(values)), mode="edge")
