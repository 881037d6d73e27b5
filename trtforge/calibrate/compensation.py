"""Compensated rounding: the codes of a weight's columns one after another, each correcting the errors before it.

GPTQ (Frantar et al., arXiv:2210.17323) in the form of QuIP's LDLQ (Chee et al., arXiv:2307.13304): with the Gram matrix
of the inputs H = R Rᵀ, R upper triangular, the output error of a weight error D is ‖D R‖²; its column j depends on the
columns of D up to j only, so each column is rounded to what makes its own part smallest. Groups keep the order of the
layout; a group's scale is searched where its first column is rounded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.calibrate.grids import Grid
from trtforge.calibrate.precision import search_dtype
from trtforge.models.transforms import TORCH

DAMPING = 0.03  # of the mean diagonal of H; GPTQ's 0.01 was no better with many tokens and worse with few
_MOST_DAMPING = 10  # times that, with fewer tokens than inputs, which leave directions of the input unseen
_BLOCK = 128  # columns that the errors of all columns before them correct in one matrix product
_SPAN = 16  # columns within a group, likewise
_TINY = torch.finfo(torch.float32).tiny
_ATTEMPTS = 4  # each with ten times the damping of the one before


@dataclass(frozen=True)
class Factor:
    """R of H = R Rᵀ (in, in) float32, as `feedback` R / its `diagonal`: upper triangular with ones on the diagonal.

    `damping`: what was added to the diagonal of H, in addition to the noise of the inputs.
    """

    feedback: Tensor
    diagonal: Tensor
    damping: float

    @classmethod
    def of(cls, gram: Tensor, tokens: int, noise: Tensor | None = None) -> "Factor | None":
        """The factor of the damped Gram matrix (in, in) of `tokens` inputs; None if none is positive definite.

        `noise` (in,): squared errors of the inputs, which add to the errors of the outputs. Overwrites `gram`.
        """
        diagonal = gram.diagonal()
        if noise is not None:
            diagonal.add_(noise)
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
                triangle = lower.flip(0, 1)
                own = triangle.diagonal().clone()
                return cls(triangle.div_(own), own, added)
        return None

    def errors(self, difference: Tensor) -> Tensor:
        """(out,) squared output errors of a weight error (out, in), by the damped Gram matrix."""
        return (difference @ self.feedback).mul_(self.diagonal).square_().sum(dim=1)

    def shrunk(self, weight: Tensor, noise: Tensor) -> Tensor:
        """The weight (out, in) whose outputs of noisy inputs are closest to those of `weight`: W H (H + noise)⁻¹."""
        rows = weight * noise
        half = torch.linalg.solve_triangular(self.feedback.T, rows, upper=False, left=False, unitriangular=True)
        half.div_(self.diagonal.square())
        found: Tensor = torch.linalg.solve_triangular(self.feedback, half, upper=True, left=False, unitriangular=True)
        return weight - found

    def undamped_error(self, difference: Tensor) -> float:
        """The squared output error of a weight error (out, in), without the part of the damping."""
        return max(0.0, float(self.errors(difference).sum() - self.damping * difference.square().sum()))


@dataclass(frozen=True)
class Compensated:
    """`levels` (out, in) int8 in `unit`s, and `steps` (out, in / group) float32, of a scaled weight.

    `errors` (out,): squared output errors, by the damped Gram matrix.
    """

    levels: Tensor
    steps: Tensor
    errors: Tensor
    unit: float

    @property
    def values(self) -> Tensor:
        """(out, in) float32 values of the scaled weight that the levels stand for."""
        grouped = self.levels.float().unflatten(1, (self.steps.shape[1], -1))
        values: Tensor = grouped.mul_(self.unit * self.steps.unsqueeze(2)).flatten(1)
        return values

    def of_rows(self, rows: Tensor) -> "Compensated":
        """Some outputs."""
        return Compensated(self.levels[rows], self.steps[rows], self.errors[rows], self.unit)


def compensate(weight: Tensor, pre_quant_scale: Tensor, factor: Factor, grid: Grid) -> Compensated:
    """Round `weight` (out, in) / `pre_quant_scale` (in,), whose inputs are multiplied by the latter.

    `factor`: of the inputs before that multiplication.
    """
    scales = pre_quant_scale.unsqueeze(1)
    columns = weight.T.contiguous()  # (in, out): a column of the weight is contiguous
    differences, levels = torch.empty_like(columns), torch.empty_like(columns, dtype=torch.int8)
    done = torch.empty_like(columns, dtype=TORCH[search_dtype(columns.device.type)])  # the differences, once more
    weights = factor.diagonal.square()
    steps, errors = [], columns.new_zeros(columns.shape[1])
    for begin in range(0, len(columns), _BLOCK):
        end = min(begin + _BLOCK, len(columns))
        back = factor.feedback[:end, begin:end]
        targets = columns[begin:end] - back[:begin].T.to(done.dtype) @ done[:begin]
        for start in range(begin, end, grid.group):
            stop = start + grid.group
            inside, group = slice(start - begin, stop - begin), slice(start, stop)
            wanted = targets[inside]
            if start > begin:
                wanted.addmm_(back[begin:start, inside].T, differences[begin:start], alpha=-1)
            step = grid.best_steps(wanted / scales[group], weights[group] * pre_quant_scale[group].square())
            quanta = (step * scales[group]).clamp_(min=_TINY)
            found = _round_group(columns[group], wanted, quanta, back[group, inside], differences[group], grid)
            levels[group] = found.div_(grid.unit)
            steps.append(step)
        missed = (differences[begin:end] + columns[begin:end]).sub_(targets)
        errors += weights[begin:end] @ missed.square_()
        done[begin:end] = differences[begin:end]
    return Compensated(levels.T, torch.stack(steps, dim=1), errors, grid.unit)


def _round_group(
    columns: Tensor, targets: Tensor, quanta: Tensor, feedback: Tensor, differences: Tensor, grid: Grid
) -> Tensor:
    """The levels (group, out) of a group's `columns`, float32; fills in `differences` and corrects `targets`.

    `quanta` (group, out): what a level of one stands for.
    """
    levels, negative = torch.empty_like(columns), columns.neg()
    back = feedback.triu(1).T.contiguous()
    differences.zero_()  # so that the columns to come add nothing to a product
    for first in range(0, len(columns), _SPAN):
        span = slice(first, min(first + _SPAN, len(columns)))
        if first:
            targets[span].addmm_(back[span, :first], differences[:first], alpha=-1)
        done = differences[span].T
        rows = (each[span].unbind() for each in (targets, quanta, levels, negative, differences, back[:, span]))
        for target, quantum, level, minus, difference, earlier in zip(*rows, strict=True):
            target.addmv_(done, earlier, alpha=-1)
            grid.round_(torch.div(target, quantum, out=level))
            torch.addcmul(minus, level, quantum, out=difference)
    return levels
