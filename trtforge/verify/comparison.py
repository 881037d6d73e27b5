"""Compares two models on the same tokens: perplexity, divergence and agreement, accumulated window by window."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trtforge.verify.bootstrap import divergence_interval, percentile_99, percentile_interval, perplexity_interval
from trtforge.verify.result import Blocks, Divergence, Perplexity

_BLOCK = 64  # tokens: longer than the correlation of neighbouring tokens' errors
_MOST_BLOCKS = 512  # blocks get longer instead of more: enough for an interval, and the report stays small


@dataclass
class Comparison:
    """Sums over all predicted tokens. Feed logits (length, vocab) of reference and candidate and the window's ids."""

    tokens: int = 0
    reference_nll: float = 0.0
    candidate_nll: float = 0.0
    divergence: float = 0.0
    agreements: int = 0
    largest_error: float = field(default=0.0)
    _by_token: list[Tensor] = field(default_factory=list)  # (2 likelihoods and divergence, up to _BLOCK), of blocks

    def add(self, reference: Tensor, candidate: Tensor, ids: Tensor) -> None:
        """One window: position i predicts ids[i + 1]."""
        expected, got, targets = reference[:-1].float(), candidate[:-1].float(), ids[1:]
        expected_log, got_log = expected.log_softmax(-1), got.log_softmax(-1)
        self.tokens += len(targets)
        by_token = torch.stack(
            (
                functional.nll_loss(expected_log, targets, reduction="none"),
                functional.nll_loss(got_log, targets, reduction="none"),
                (expected_log.exp() * (expected_log - got_log)).sum(-1),
            )
        ).double()
        self._by_token += by_token.split(_BLOCK, dim=1)
        sums = by_token.sum(dim=1)
        self.reference_nll += float(sums[0])
        self.candidate_nll += float(sums[1])
        self.divergence += float(sums[2])
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

    @property
    def perplexity(self) -> Perplexity:
        """The perplexities, with the interval of the increase."""
        return Perplexity(
            reference=self.reference_perplexity,
            candidate=self.candidate_perplexity,
            interval=perplexity_interval(self.blocks),
        )

    @property
    def divergences(self) -> Divergence:
        """Mean and 99th percentile of the divergence, in nats per token, with intervals.

        Equal models differ by rounding noise of either sign; negative values are reported as zero.
        """
        values = torch.cat(self._by_token, dim=1)[2].numpy()
        lengths = [piece.shape[1] for piece in self._by_token]
        block_of = np.repeat(np.arange(len(lengths)) // self._pieces_in_block, lengths)
        return Divergence(
            mean=_not_negative(self.divergence / self.tokens),
            p99=_not_negative(percentile_99(values)),
            mean_interval=divergence_interval(self.blocks),
            p99_interval=percentile_interval(values, block_of, self.blocks),
        )

    @property
    def blocks(self) -> Blocks:
        """Sums over blocks of at least _BLOCK tokens; the last block of a window is shorter."""
        count = self._pieces_in_block
        groups = [self._by_token[start : start + count] for start in range(0, len(self._by_token), count)]
        sums = torch.stack([torch.cat(group, dim=1).sum(dim=1) for group in groups]).T.tolist()
        reference, candidate, divergence = (tuple(map(_short, values)) for values in sums)
        tokens = tuple(sum(piece.shape[1] for piece in group) for group in groups)
        return Blocks(tokens=tokens, reference=reference, candidate=candidate, divergence=divergence)

    @property
    def _pieces_in_block(self) -> int:
        return -(-len(self._by_token) // _MOST_BLOCKS)


def _not_negative(value: float) -> float:
    return 0.0 if value < 0 else value  # max() would drop a NaN


def _short(value: float) -> float:
    return float(f"{value:.9g}")
