"""Compensated rounding: the codes of a weight's columns one after another, each correcting the errors before it.

GPTQ (Frantar et al., arXiv:2210.17323) in the form of QuIP's LDLQ (Chee et al., arXiv:2307.13304): with the Gram matrix
of the inputs H = R Rᵀ, R upper triangular, the output error of a weight error D is ‖D R‖²; its column j depends on the
columns of D up to j only, so each column is rounded to what makes its own part smallest. Groups keep the order of the
layout; a group's scale is searched where its first column is rounded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.models.transforms import INT4_MAX

DAMPING = 0.03  # of the mean diagonal of H; GPTQ's 0.01 was no better with many tokens and worse with few
_MOST_DAMPING = 10  # times that, with fewer tokens than inputs, which leave directions of the input unseen
RATIOS = tuple(round(1 - 0.0375 * step, 4) for step in range(9))  # of a group's amax, tried as its range
_SPAN = 32  # columns after which the columns that follow in a group are corrected by a matrix product
_ATTEMPTS = 4  # each with ten times the damping of the one before


@dataclass(frozen=True)
class Factor:
    """R of H = R Rᵀ, upper triangular (in, in) float32. `damping`: what was added to the diagonal of H."""

    triangle: Tensor
    damping: float

    @classmethod
    def of(cls, gram: Tensor, tokens: int) -> "Factor | None":
        """The factor of the damped Gram matrix (in, in) of `tokens` inputs; None if none is positive definite.

        Overwrites `gram`.
        """
        diagonal = gram.diagonal()
        mean = float(diagonal.mean())
        if not 0 < mean < float("inf"):
            return None
        share, added = DAMPING * min(_MOST_DAMPING, max(1.0, len(gram) / tokens)), 0.0
        for attempt in range(_ATTEMPTS):
            wanted = share * mean * 10**attempt
            diagonal.add_(wanted - added)
            added = wanted
            # The Cholesky factor of H with its rows and columns reversed, reversed again, is upper triangular.
            lower, failed = torch.linalg.cholesky_ex(gram.flip(0, 1))
            if not int(failed):
                return cls(lower.flip(0, 1), added)
        return None

    def errors(self, difference: Tensor) -> Tensor:
        """(out,) squared output errors of a weight error (out, in), by the damped Gram matrix."""
        return (difference @ self.triangle).square_().sum(dim=1)


@dataclass(frozen=True)
class Compensated:
    """INT4 `codes` (out, in) int8 and `scales` (out, in / group) float32 of a scaled weight.

    `errors` (out,): squared output errors, by the damped Gram matrix.
    """

    codes: Tensor
    scales: Tensor
    errors: Tensor


def compensate(weight: Tensor, pre_quant_scale: Tensor, factor: Factor, group_size: int) -> Compensated:
    """Round `weight` (out, in) / `pre_quant_scale` (in,), whose inputs are multiplied by the latter.

    `factor`: of the inputs before that multiplication.
    """
    columns = (weight / pre_quant_scale).T.contiguous()  # (in, out): a column of the weight is contiguous
    own = factor.triangle.diagonal() * pre_quant_scale  # what the error of a column alone amounts to
    differences = columns.neg()
    codes = torch.empty_like(columns, dtype=torch.int8)
    scales, errors = [], columns.new_zeros(columns.shape[1])
    for start in range(0, len(columns), group_size):
        stop = start + group_size
        feedback = factor.triangle[:stop, start:stop] * pre_quant_scale[:stop, None] / own[start:stop]
        wanted = torch.addmm(columns[start:stop], feedback[:start].T, differences[:start], alpha=-1)
        weights = own[start:stop].square()
        step = best_steps(wanted, weights)
        for first in range(start, stop, _SPAN):
            span, inside = slice(first, first + _SPAN), slice(first - start, first - start + _SPAN)
            targets, within = wanted[inside], feedback[span, inside]
            targets.addmm_(feedback[start:first, inside].T, differences[start:first], alpha=-1)
            for index, column in enumerate(range(first, first + _SPAN)):
                target = targets[index].addmv_(differences[first:column].T, within[:index, index], alpha=-1)
                rounded = (target / step).round_().clamp_(-8, 7)
                codes[column] = rounded
                differences[column].addcmul_(rounded, step)
            missed = (differences[span] + columns[span]).sub_(targets)
            errors += weights[inside] @ missed.square_()
        scales.append(step)
    return Compensated(codes.T, torch.stack(scales, dim=1), errors)


def best_steps(columns: Tensor, weights: Tensor) -> Tensor:
    """(out,) the step of each output's group, given its `columns` (group, out) and the `weights` of their errors."""
    amax = columns.abs().amax(dim=0)
    least = torch.full_like(amax, torch.inf)
    best = torch.ones_like(amax)
    for ratio in RATIOS:  # 1.0 first: no clipping on a tie
        steps = (amax * (ratio / INT4_MAX)).clamp_(min=torch.finfo(torch.float32).tiny)
        error = (columns / steps).round_().clamp_(-8, 7).mul_(steps).sub_(columns)
        loss = weights @ error.square_()
        better = loss < least
        least = torch.where(better, loss, least)
        best = torch.where(better & (amax > 0), steps, best)
    return best
