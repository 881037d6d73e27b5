"""Compensated rounding: the codes of a weight's columns one after another, each correcting the errors before it.

GPTQ (Frantar et al., arXiv:2210.17323) in the form of QuIP's LDLQ (Chee et al., arXiv:2307.13304): with the Gram matrix
of the inputs H = R Rᵀ, R upper triangular, the output error of a weight error D is ‖D R‖²; its column j depends on the
columns of D up to j only, so each column is rounded to what makes its own part smallest. Columns with the largest
inputs come first (GPTQ's act-order), because those after them can make up for their errors; the scales of all groups
are searched before, so that the groups of the layout stay. Then each column is rounded once more, to what is best for
all others as they are (coordinate descent).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.calibrate.grids import Grid
from trtforge.calibrate.precision import search_dtype
from trtforge.models.transforms import TORCH

DAMPING = 0.03  # of the mean diagonal of H; GPTQ's 0.01 was no better with many tokens and worse with few
_MOST_DAMPING = 10  # times that, with fewer tokens than inputs, which leave directions of the input unseen
_BLOCK = 128  # columns that the errors of all columns before them correct in one matrix product
_SPAN = 16  # columns within a block, likewise
_TINY = torch.finfo(torch.float32).tiny
_ATTEMPTS = 4  # each with ten times the damping of the one before


@dataclass(frozen=True)
class Factor:
    """R of H = R Rᵀ (in, in) float32, as `feedback` R / its `diagonal`: upper triangular with ones on the diagonal.

    Rows and columns are in `order` (in,), that of rounding. `gram`: H. `damping`: what was added to the diagonal of H,
    in addition to the noise of the inputs.
    """

    feedback: Tensor
    diagonal: Tensor
    damping: float
    gram: Tensor
    order: Tensor

    @classmethod
    def of(cls, gram: Tensor, tokens: int, noise: Tensor | None = None) -> "Factor | None":
        """The factor of the damped Gram matrix (in, in) of `tokens` inputs; None if none is positive definite.

        `noise` (in,): squared errors of the inputs, which add to the errors of the outputs. Overwrites `gram`.
        """
        if noise is not None:
            gram.diagonal().add_(noise)
        order = gram.diagonal().argsort(descending=True, stable=True)
        gram = gram[order]
        gram = gram[:, order]
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
                triangle = lower.flip(0, 1)
                own = triangle.diagonal().clone()
                return cls(triangle.div_(own), own, added, gram, order)
        return None

    @property
    def weights(self) -> Tensor:
        """(in,), in the layout's order: the weight of each column's squared error, if later ones make up for it."""
        return torch.empty_like(self.diagonal).index_copy_(0, self.order, self.diagonal.square())

    def errors(self, difference: Tensor) -> Tensor:
        """(out,) squared output errors of a weight error (out, in), by the damped Gram matrix."""
        return (difference[:, self.order] @ self.feedback).mul_(self.diagonal).square_().sum(dim=1)

    def shrunk(self, weight: Tensor, noise: Tensor) -> Tensor:
        """The weight (out, in) whose outputs of noisy inputs are closest to those of `weight`: W H (H + noise)⁻¹."""
        rows = (weight * noise)[:, self.order]
        half = torch.linalg.solve_triangular(self.feedback.T, rows, upper=False, left=False, unitriangular=True)
        half.div_(self.diagonal.square())
        found: Tensor = torch.linalg.solve_triangular(self.feedback, half, upper=True, left=False, unitriangular=True)
        return weight.index_add(1, self.order, found, alpha=-1)

    def undamped_error(self, difference: Tensor) -> float:
        """The squared output error of a weight error (out, in), without the part of the damping."""
        return max(0.0, float(self.errors(difference).sum() - self.damping * difference.square().sum()))


@dataclass(frozen=True)
class Compensated:
    """`levels` (out, in) int8 in `unit`s, and `steps` (out, in / group) float32, of a scaled weight."""

    levels: Tensor
    steps: Tensor
    unit: float

    @property
    def values(self) -> Tensor:
        """(out, in) float32 values of the scaled weight that the levels stand for."""
        grouped = self.levels.float().unflatten(1, (self.steps.shape[1], -1))
        values: Tensor = grouped.mul_(self.unit * self.steps.unsqueeze(2)).flatten(1)
        return values

    def of_rows(self, rows: Tensor) -> "Compensated":
        """Some outputs."""
        return Compensated(self.levels[rows], self.steps[rows], self.unit)


def compensate(weight: Tensor, pre_quant_scale: Tensor, factor: Factor, grid: Grid) -> Compensated:
    """Round `weight` (out, in) / `pre_quant_scale` (in,), whose inputs are multiplied by the latter.

    `factor`: of the inputs before that multiplication.
    """
    columns = weight.T.contiguous()  # (in, out): a column of the weight is contiguous
    steps = _searched_steps(columns, pre_quant_scale, factor, grid)
    work = _Work(columns, pre_quant_scale, steps, factor, grid)
    del columns
    for block in work.blocks():
        back = factor.feedback[: block.stop, block]
        work.round(block, back[: block.start], back[block.start :])
    for block in work.blocks():
        shares = factor.gram[:, block] / factor.gram.diagonal()[block]
        inside = shares[block].triu(1)
        shares[block].tril_(-1)  # the columns before count with their new errors, in `inside`
        work.round(block, shares, inside)
    return Compensated(work.levels.T, steps, grid.unit)


def _searched_steps(columns: Tensor, pre_quant_scale: Tensor, factor: Factor, grid: Grid) -> Tensor:
    """(out, in / group) the steps of all groups of `columns` (in, out)."""
    scales, weights = pre_quant_scale.unsqueeze(1), factor.weights * pre_quant_scale.square()
    groups = [slice(at, at + grid.group) for at in range(0, len(columns), grid.group)]
    return torch.stack([grid.best_steps(columns[at] / scales[at], weights[at]) for at in groups], dim=1)


class _Work:
    """Columns of a weight in the order of `factor`, their errors and levels so far.

    `columns` and `differences` (in, out) are in that order, `levels` (in, out) int8 in the order of the layout.
    """

    def __init__(self, columns: Tensor, pre_quant_scale: Tensor, steps: Tensor, factor: Factor, grid: Grid) -> None:
        self._steps, self._scales, self._order, self._grid = steps.T, pre_quant_scale, factor.order, grid
        self.columns = columns.index_select(0, factor.order)
        self.differences = torch.empty_like(self.columns)
        self.levels = torch.empty_like(self.columns, dtype=torch.int8)
        dtype = TORCH[search_dtype(self.columns.device.type)]
        self._done = torch.empty_like(self.columns, dtype=dtype)  # the differences, once more

    def blocks(self) -> Iterator[slice]:
        """The columns that are rounded together."""
        for begin in range(0, len(self.columns), _BLOCK):
            yield slice(begin, min(begin + _BLOCK, len(self.columns)))

    def round(self, block: slice, outside: Tensor, inside: Tensor) -> None:
        """Round the columns of a block to what their targets are: themselves, less shares of errors.

        `outside` (columns, block): the shares of the first columns' errors so far; `inside` (block, block), upper
        triangular: those of the errors that are made here.
        """
        columns, order = self.columns[block], self._order[block]
        targets = columns - outside.T.to(self._done.dtype) @ self._done[: len(outside)]
        quanta = (self._steps[order // self._grid.group] * self._scales[order].unsqueeze(1)).clamp_(min=_TINY)
        found = _round_block(columns, targets, quanta, inside, self.differences[block], self._grid, order.tolist())
        self.levels[order] = found.div_(self._grid.unit).to(torch.int8)
        self._done[block] = self.differences[block]


def _round_block(
    columns: Tensor,
    targets: Tensor,
    quanta: Tensor,
    feedback: Tensor,
    differences: Tensor,
    grid: Grid,
    order: list[int],
) -> Tensor:
    """The levels (block, out) of a block's `columns`, float32; fills in `differences` and corrects `targets`.

    `quanta` (block, out): what a level of one stands for. `order`: the columns' places in the layout.
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
        for column, (target, quantum, level, minus, difference, earlier) in enumerate(zip(*rows, strict=True), first):
            target.addmv_(done, earlier, alpha=-1)
            grid.round_(torch.div(target, quantum, out=level))
            grid.limited_(level, order[column])
            torch.addcmul(minus, level, quantum, out=difference)
    return levels
