"""Compares two models on the same tokens: perplexity, divergence and agreement, accumulated window by window."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional


@dataclass
class Comparison:
    """Sums over all predicted tokens. Feed logits (length, vocab) of reference and candidate and the window's ids."""

    tokens: int = 0
    reference_nll: float = 0.0
    candidate_nll: float = 0.0
    divergence: float = 0.0
    agreements: int = 0
    largest_error: float = field(default=0.0)

    def add(self, reference: Tensor, candidate: Tensor, ids: Tensor) -> None:
        """One window: position i predicts ids[i + 1]."""
        expected, got, targets = reference[:-1].float(), candidate[:-1].float(), ids[1:]
        expected_log, got_log = expected.log_softmax(-1), got.log_softmax(-1)
        self.tokens += len(targets)
        self.reference_nll += float(functional.nll_loss(expected_log, targets, reduction="sum"))
        self.candidate_nll += float(functional.nll_loss(got_log, targets, reduction="sum"))
        self.divergence += float((expected_log.exp() * (expected_log - got_log)).sum())
        self.agreements += int((expected.argmax(-1) == got.argmax(-1)).sum())
        largest = float((expected - got).abs().max())
        # max() would drop a NaN, which must be reported.
        self.largest_error = largest if math.isnan(largest) else max(self.largest_error, largest)

    @property
    def reference_perplexity(self) -> float:
        """exp of the mean negative log-likelihood of the reference."""
        return float(torch.tensor(self.reference_nll / self.tokens, dtype=torch.float64).exp())

    @property
    def candidate_perplexity(self) -> float:
        """exp of the mean negative log-likelihood of the candidate."""
        return float(torch.tensor(self.candidate_nll / self.tokens, dtype=torch.float64).exp())
