"""Penalties for tokens that occurred. Only their logits are read and written: hundreds of 128,000."""

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
"""Changed logits are clamped to this: the softmax of an infinite logit is NaN."""


class Penalties:
    """Repetition, presence and frequency penalties. Counts tokens of unfinished sequences; call `forget` at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._occurred: dict[Sequence, _Occurrences] = {}

    def apply(self, rows: Several[Sequence], logits: Tensor, places: Several[int]) -> None:
        """Change the sequences' logits, rows `places` of logits (any, vocabulary), as penaltyKernels.cu does."""
        occurred = [self._occurrences(row) for row in rows]
        if not all(each.count for each in occurred):  # a prompt of virtual tokens only
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
        """The sequence's updated counts; they start anew if it got another's tokens, as in a beam search."""
        found = self._occurred.get(row)
        if found is None or found.of is not row.tokens:
            ignored = min(row.request.sampling.prompt_ignore_length, len(row.request.prompt))
            found = self._occurred[row] = _Occurrences(row.tokens, row.limit, ignored)
        found.count_new()
        return found


class _Occurrences:
    """The first `count` entries of `tokens` and `counts`: the different tokens of a list, and how often each occurs.

    The list grows to at most `limit`. Its first `ignored` tokens are listed, but not counted.
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
        """Count the added tokens, except rows of a prompt table, which have no logit."""
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
    """Pad by repeating the last value: a repeated token gets the same logit again."""
    return np.pad(values, (0, length - len(values)), mode="edge")
