"""INT4 with one scale per output, as TensorRT-LLM's build computes it from a weight-only checkpoint.

The build takes the largest magnitude of an output / 8 as its scale (runtime.linears.weight_only), on a rank of a
row-parallel linear, of the rank's columns. The build reproduces codes only if each of these parts has a code at an end
of the range, 7 or -8 (models.weight_only). So one column of each part is fixed to such a code.
"""

from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from trtforge.models.transforms import pack_int4
from trtforge.runtime.linears.weight_only import quantize_weight_only
from trtforge.runtime.native.rounding import Levels

_LOWEST, _HIGHEST = -8, 7
_RATIOS = tuple(round(1.075 - 0.05 * step, 3) for step in range(11))  # of an output's amax, candidates for its range
_WIDTH = 64  # columns rounded together
_FITTED_ROWS = 1024  # outputs whose steps are searched at once
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class RowGrid:
    """Integers from -8 to 7, one step per output. `parts`: of the `inputs`, each with a code at an end of the range.

    Once fitted: `steps` (out,) float32 values that bfloat16 can represent, and `ends` (in, out) int8: 7 or -8 if fixed,
    else 0.
    """

    inputs: int
    parts: int
    steps: Tensor | None = None
    ends: Tensor | None = None

    @property
    def group(self) -> int:
        return gcd(self.inputs, _WIDTH)

    @property
    def unit(self) -> float:
        return 1.0

    @property
    def levels(self) -> Levels:
        return "int4"

    def fitted(self, weight: Tensor, weights: Tensor) -> "RowGrid":
        found = [self._fit(rows, weights) for rows in weight.split(_FITTED_ROWS)]
        steps, ends = (torch.cat(each, dim=-1) for each in zip(*found, strict=True))
        return replace(self, steps=steps, ends=ends)

    def _fit(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """(out,) steps with the least squared error by `weights`, and their (in, out) ends."""
        amax = rows.abs().amax(dim=1)
        least, best = torch.full_like(amax, torch.inf), torch.ones_like(amax)
        for ratio in _RATIOS:
            steps = (amax * (ratio / -_LOWEST)).bfloat16().float().clamp_(min=_TINY)
            scaled = rows / steps.unsqueeze(1)
            squares = (scaled.round().clamp_(_LOWEST, _HIGHEST) - scaled).square_() * weights
            forced = self._to_ends(scaled)[0] * weights - squares  # additional loss if this column has the end
            loss = squares.sum(dim=1) + forced.unflatten(1, (self.parts, -1)).amin(dim=2).sum(dim=1)
            loss *= steps.square()
            better = (loss < least) & (amax > 0)
            least, best = torch.where(better, loss, least), torch.where(better, steps, best)
        scaled = rows / best.unsqueeze(1)
        squares, nearest = self._to_ends(scaled)
        costs = squares - (scaled.round().clamp_(_LOWEST, _HIGHEST) - scaled).square_()
        column = (costs * weights).unflatten(1, (self.parts, -1)).argmin(dim=2, keepdim=True)
        limited = torch.zeros_like(costs, dtype=torch.bool).unflatten(1, (self.parts, -1))
        limited.scatter_(2, column, (amax > 0)[:, None, None].expand_as(column))
        return best, (nearest * limited.flatten(1)).to(torch.int8).T

    @staticmethod
    def _to_ends(scaled: Tensor) -> tuple[Tensor, Tensor]:
        """Squared distances to the closer end of the range, and that end."""
        upper = scaled >= -0.5
        end = torch.where(upper, float(_HIGHEST), float(_LOWEST))
        return (scaled - end).square_(), end

    def round_(self, values: Tensor) -> Tensor:
        return values.round_().clamp_(_LOWEST, _HIGHEST)

    def best_steps(self, columns: Tensor, weights: Tensor) -> Tensor:
        assert self.steps is not None, "a grid is fitted first"
        return self.steps

    def nearest(self, weight: Tensor) -> Tensor:
        codes, scales = quantize_weight_only(weight, 4)
        return codes.float() * scales.unsqueeze(1)

    def stored(self, levels: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        return pack_int4(levels), steps[:, :1].contiguous()

    def of_rows(self, rows: slice | Tensor) -> "RowGrid":
        if self.steps is None or self.ends is None:
            return self
        return replace(self, steps=self.steps[rows], ends=self.ends[:, rows])
