"""Compensated rounding: the codes of a weight's columns one after another, each correcting the errors before it.

GPTQ (Frantar et al., arXiv:2210.17323) in the form of QuIP's LDLQ (Chee et al., arXiv:2307.13304): with the Gram matrix
of the inputs H = L Lᵀ, L lower triangular, the output error of a weight error D is ‖D L‖²; its column j depends only on
columns j and later of D. So the columns are rounded from the last to the first, each to the value that minimises its
column of D L. Columns with the largest inputs come last and are rounded first (GPTQ's act-order), because the remaining
columns can compensate for their errors; the scales of all groups are searched before, so that the groups keep the
layout's order. Then each column is rounded again, to the best value with all others fixed (coordinate descent).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.calibrate.grids import Grid
from trtforge.calibrate.precision import search_dtype
from trtforge.models.transforms import TORCH
from trtforge.runtime.native.rounding import LONGEST, rounding_kernels

DAMPING = 0.03  # of the mean diagonal of H; GPTQ's 0.01 was not better with many tokens and worse with few
_MOST_DAMPING = 10  # times DAMPING, with fewer tokens than inputs, which leave some input directions unobserved
_WIDE = 512  # columns whose gradients are computed together
_SWEEPS = 3  # over the columns in the refinement; fewer if no level changes
_SPAN = 16  # columns of a block that are corrected for earlier ones in one matrix product, without kernels
_PARTS = 4  # of a triangular factor's columns; the zeros above each part are left out of products
_TINY = torch.finfo(torch.float32).tiny
_ATTEMPTS = 4  # each with ten times the damping of the previous one


@dataclass(frozen=True)
class Factor:
    """`lower` L of H = L Lᵀ (in, in) float32, lower triangular.

    Rows and columns are in `order` (in,): from the smallest inputs to the largest, the last column is rounded first.
    `gram`: H. `damping`: the value added to the diagonal of H.
    """

    lower: Tensor
    damping: float
    gram: Tensor
    order: Tensor

    @classmethod
    def of(cls, gram: Tensor, tokens: int) -> "Factor | None":
        """The factor of the damped Gram matrix (in, in) of `tokens` inputs; None if it is not positive definite with
        any damping."""
        order = gram.diagonal().argsort(stable=True)
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
            lower, failed = torch.linalg.cholesky_ex(gram)
            if not int(failed):
                return cls(lower, added, gram, order)
        return None

    @property
    def weights(self) -> Tensor:
        """(in,), in the layout's order: the weight of each column's squared error, if others compensate for it."""
        diagonal = self.lower.diagonal()
        return torch.empty_like(diagonal).index_copy_(0, self.order, diagonal.square())

    def errors(self, difference: Tensor) -> Tensor:
        """(out,) squared output errors of a weight error (out, in), by the damped Gram matrix."""
        ordered, total = difference[:, self.order], torch.zeros(len(difference), device=difference.device)
        for part in torch.arange(len(self.order)).chunk(_PARTS):
            first, stop = int(part[0]), int(part[-1]) + 1
            total += (ordered[:, first:] @ self.lower[first:, first:stop]).square_().sum(dim=1)
        return total

    def adapted(self, weight: Tensor, cross: Tensor) -> Tensor:
        """The weight (out, in) whose outputs for rounded inputs are closest to those of `weight` for the original
        inputs.

        H is of the rounded inputs X + N, `cross` (in, in) Nᵀ(X + N): W' = W Xᵀ(X + N) H⁻¹ = W - W Nᵀ(X + N) H⁻¹.
        """
        rows = (weight @ cross)[:, self.order]
        half = torch.linalg.solve_triangular(self.lower.T, rows, upper=True, left=False)
        found: Tensor = torch.linalg.solve_triangular(self.lower, half, upper=False, left=False)
        return weight.index_add(1, self.order, found, alpha=-1)

    def undamped_errors(self, difference: Tensor) -> Tensor:
        """(out,) squared output errors of a weight error (out, in), without the contribution of the damping."""
        return self.errors(difference) - self.damping * difference.square().sum(dim=1)


@dataclass(frozen=True)
class Compensated:
    """`levels` (out, in) int8 in `unit`s, and `steps` (out, in / group) float32, of a scaled weight."""

    levels: Tensor
    steps: Tensor
    unit: float

    @property
    def values(self) -> Tensor:
        """(out, in) float32 values of the levels, of the scaled weight."""
        grouped = self.levels.float().unflatten(1, (self.steps.shape[1], -1))
        values: Tensor = grouped.mul_(self.unit * self.steps.unsqueeze(2)).flatten(1)
        return values

    def of_rows(self, rows: Tensor) -> "Compensated":
        """Some outputs."""
        return Compensated(self.levels[rows], self.steps[rows], self.unit)


def compensate(weight: Tensor, pre_quant_scale: Tensor, factor: Factor, grid: Grid) -> Compensated:
    """Round `weight` (out, in) / `pre_quant_scale` (in,), whose inputs are multiplied by `pre_quant_scale`.

    `factor`: of the inputs before that multiplication.
    """
    columns = weight.T.contiguous()  # (in, out): a column of the weight is contiguous
    steps = _searched_steps(columns, pre_quant_scale, factor, grid)
    work = _Work(columns, pre_quant_scale, steps, factor, grid)
    del columns
    work.round()
    work.refine()
    return Compensated(work.levels.T.index_select(1, factor.order.argsort()), steps.T, grid.unit)


def _searched_steps(columns: Tensor, pre_quant_scale: Tensor, factor: Factor, grid: Grid) -> Tensor:
    """(in / group, out) the steps of all groups of `columns` (in, out)."""
    scales, weights = pre_quant_scale.unsqueeze(1), factor.weights * pre_quant_scale.square()
    groups = [slice(at, at + grid.group) for at in range(0, len(columns), grid.group)]
    return torch.stack([grid.best_steps(columns[at] / scales[at], weights[at]) for at in groups])


class _Work:
    """Columns of a weight, their errors, residuals and levels so far: (in, out), all in the order of `factor`."""

    def __init__(self, columns: Tensor, pre_quant_scale: Tensor, steps: Tensor, factor: Factor, grid: Grid) -> None:
        self._factor, self._grid, self._steps = factor, grid, steps
        self._scales, self._groups = pre_quant_scale[factor.order], factor.order // grid.group
        self._columns = columns.index_select(0, factor.order)
        self._ends = None if grid.ends is None else grid.ends[factor.order]
        dtype = TORCH[search_dtype(columns.device.type)]
        self._errors = torch.empty_like(self._columns, dtype=dtype)
        self._residuals = torch.empty_like(self._errors)
        self.levels = torch.empty_like(self._columns, dtype=torch.int8)
        self._kernels = rounding_kernels(columns.device)

    def round(self) -> None:
        """Round all columns, from the last to the first, so that each compensates for the errors of later columns."""
        lower = self._factor.lower
        for block in self._blocks():
            shares = lower[block.start :, block] / lower.diagonal()[block]
            width = block.stop - block.start
            self._round(block, shares[width:], shares[:width].tril_(-1), self._errors[block.stop :])

    def refine(self) -> None:
        """Round all columns again, each to the best level with all others fixed."""
        if self._kernels is not None:
            del self._columns, self._errors  # to free memory
            levels = self.levels.T.contiguous()
            ends = None if self._ends is None else self._ends.T.contiguous()
            gradients, steps = self._gradients(), self._steps.T.contiguous()
            gram, diagonal = self._factor.gram.to(gradients.dtype), self._factor.gram.diagonal().contiguous()
            given = gradients, gram, diagonal, self._scales, self._groups, steps, ends
            self._kernels.refine_(self._grid.levels, levels, *given, _SWEEPS)
            self.levels = levels.T
            return
        gram = self._factor.gram
        for block in self._blocks():
            shares = gram[:, block] / gram.diagonal()[block]
            inside = shares[block].tril(-1)
            shares[block].triu_(1)  # later columns of the block count with their new errors, in `inside`
            self._round(block, shares, inside, self._errors)

    def _blocks(self) -> Iterator[slice]:
        """Columns that are rounded together, the last ones first."""
        for stop in range(len(self._columns), 0, -LONGEST):
            yield slice(max(0, stop - LONGEST), stop)

    def _gradients(self) -> Tensor:
        """(out, in) half of the derivatives of the output error ‖D L‖², D L Lᵀ, of levels that `round` found.

        D L follows from the residuals, and L is triangular: half of the product of the errors and the Gram matrix.
        """
        lower, dtype = self._factor.lower, self._residuals.dtype
        found = torch.empty(self._residuals.shape[::-1], dtype=dtype, device=lower.device)
        for stop in range(len(lower), 0, -_WIDE):
            part = slice(max(0, stop - _WIDE), stop)
            factors = (lower[part, :stop] * lower.diagonal()[:stop]).to(dtype)
            found[:, part] = self._residuals[:stop].T @ factors.T
        return found

    def _round(self, block: slice, outside: Tensor, inside: Tensor, errors: Tensor) -> None:
        """Round the columns of a block to their targets: themselves, less shares of errors.

        `outside` (columns, block): the shares of the `errors` (columns, out); `inside` (block, block), lower
        triangular: the shares of this block's own errors.
        """
        product = outside.to(errors.dtype).T @ errors if len(errors) else None
        quanta = (self._steps[self._groups[block]] * self._scales[block].unsqueeze(1)).clamp_(min=_TINY)
        ends = None if self._ends is None else self._ends[block].contiguous()
        given = self._columns[block], product, inside.T.flip(0, 1).contiguous(), quanta, ends
        made = self._errors[block], self._residuals[block]
        if self._kernels is not None:
            self.levels[block] = self._kernels.round_block(self._grid.levels, *given, *made)
        else:
            self.levels[block] = _round_block(self._grid, *given, *made)


def _round_block(
    grid: Grid,
    columns: Tensor,
    product: Tensor | None,
    shares: Tensor,
    quanta: Tensor,
    ends: Tensor | None,
    errors: Tensor,
    residuals: Tensor,
) -> Tensor:
    """`RoundingKernels.round_block` with torch's operations."""
    targets = (columns if product is None else columns - product).flip(0)
    quanta, negative = quanta.flip(0), columns.flip(0).neg_()
    limits = None if ends is None else ends.flip(0)
    levels, differences = torch.empty_like(targets), torch.zeros_like(targets)  # zero for columns to come
    for first in range(0, len(columns), _SPAN):
        span = slice(first, min(first + _SPAN, len(columns)))
        if first:
            targets[span].addmm_(shares[span, :first], differences[:first], alpha=-1)
        done = differences[span].T
        rows = (each[span].unbind() for each in (targets, quanta, levels, negative, differences, shares[:, span]))
        for column, (target, quantum, level, minus, difference, before) in enumerate(zip(*rows, strict=True), first):
            target.addmv_(done, before, alpha=-1)
            grid.round_(torch.div(target, quantum, out=level))
            if limits is not None:
                torch.where(limits[column] == 0, level, limits[column].to(level.dtype), out=level)
            torch.addcmul(minus, level, quantum, out=difference)
    errors.copy_(differences.flip(0))
    residuals.copy_((levels * quanta).sub_(targets).flip(0))
    return levels.div_(grid.unit).to(torch.int8).flip(0)
