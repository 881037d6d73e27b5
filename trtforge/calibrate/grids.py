"""The values that 4-bit weights of a format can have, and the search for the step of each group."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from trtforge.core.number_limits import E2M1_MAX, FP8_MAX, NVFP4_BLOCK
from trtforge.models.transforms import (
    INT4_MAX,
    NVFP4_LEAST_SCALE,
    dequantize_int4,
    int4_scales,
    pack_int4,
    quantize_int4,
    quantize_nvfp4,
)
from trtforge.runtime.linears.float8 import round_to_e4m3
from trtforge.runtime.linears.nvfp4_linear import round_to_e2m1
from trtforge.runtime.native.rounding import Levels, rounding_kernels

INT4_RATIOS = tuple(round(1 - 0.05 * step, 2) for step in range(7))  # of a group's amax, candidates for its range
NVFP4_RATIOS = (1.0, 0.94, 0.88, 0.82, 0.76, 1.125, 1.25, 1.375, 1.5)  # 1.5: the largest weight becomes 4, not 6
_ROWS = 1024  # outputs whose steps are searched at once
_TINY = torch.finfo(torch.float32).tiny


class Grid(Protocol):
    """Levels (multiples of a step) that a weight can have; `group` weights of an output share a step.

    Levels are multiples of `unit`; `levels`: their name for the kernels.
    """

    @property
    def group(self) -> int: ...

    @property
    def unit(self) -> float: ...

    @property
    def levels(self) -> Levels: ...

    @property
    def ends(self) -> Tensor | None:
        """(in, out) int8: the fixed level of a weight, 0 if free; None if all weights are free."""

    def round_(self, values: Tensor) -> Tensor:
        """`values`, overwritten by the nearest levels."""

    def best_steps(self, columns: Tensor, weights: Tensor) -> Tensor:
        """(out,) the step of each output in a group of `columns` (group, out), with the least squared error weighted by
        `weights` (group,)."""

    def nearest(self, weight: Tensor) -> Tensor:
        """(out, in) `weight` rounded to the nearest level, with steps from the largest magnitudes of groups."""

    def fitted(self, weight: Tensor, weights: Tensor) -> "Grid":
        """The grid with parameters fitted to a whole weight (out, in); `weights` (in,) of the columns' errors."""

    def stored(self, levels: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales as in rank files, from `levels` (out, in) int8 in units and `steps` (out, in / group)."""

    def of_rows(self, rows: slice | Tensor) -> "Grid":
        """The grid of some outputs."""


@dataclass(frozen=True)
class Int4Grid:
    """Integers from -8 to 7; float32 steps."""

    group: int

    @property
    def unit(self) -> float:
        return 1.0

    @property
    def levels(self) -> Levels:
        return "int4"

    @property
    def ends(self) -> None:
        return None

    def round_(self, values: Tensor) -> Tensor:
        return values.round_().clamp_(-8, 7)

    def best_steps(self, columns: Tensor, weights: Tensor) -> Tensor:
        amax = _largest(columns)
        ratios = torch.tensor(INT4_RATIOS, device=amax.device).unsqueeze(1)
        candidates = (amax * (ratios / INT4_MAX)).clamp_(min=_TINY)
        return torch.where(amax > 0, _best_of(self, columns, weights, candidates), 1.0)

    def nearest(self, weight: Tensor) -> Tensor:
        steps = int4_scales(weight, self.group)
        return dequantize_int4(quantize_int4(weight, steps), steps)

    def stored(self, levels: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        return pack_int4(levels), steps

    def fitted(self, weight: Tensor, weights: Tensor) -> "Int4Grid":
        return self

    def of_rows(self, rows: slice | Tensor) -> "Int4Grid":
        return self


@dataclass(frozen=True)
class Nvfp4Grid:
    """E2M1 values; a step is an E4M3 block scale times its tensor's scale `tensor_scales` (out,)."""

    tensor_scales: Tensor

    @property
    def group(self) -> int:
        return NVFP4_BLOCK

    @property
    def unit(self) -> float:
        return 0.5

    @property
    def levels(self) -> Levels:
        return "e2m1"

    @property
    def ends(self) -> None:
        return None

    def round_(self, values: Tensor) -> Tensor:
        return values.copy_(round_to_e2m1(values))

    def best_steps(self, columns: Tensor, weights: Tensor) -> Tensor:
        amax = _largest(columns)
        ratios = torch.tensor(NVFP4_RATIOS, device=amax.device).unsqueeze(1)
        wanted = amax / (E2M1_MAX * self.tensor_scales) * ratios
        candidates = round_to_e4m3(wanted.clamp_(NVFP4_LEAST_SCALE, FP8_MAX), 1.0) * self.tensor_scales
        return torch.where(amax > 0, _best_of(self, columns, weights, candidates), self.tensor_scales)

    def nearest(self, weight: Tensor) -> Tensor:
        amax = weight.abs().unflatten(1, (-1, NVFP4_BLOCK)).amax(dim=2)
        wanted = amax / (E2M1_MAX * self.tensor_scales[:, None])
        scales = round_to_e4m3(torch.where(wanted > 0, wanted, 1.0).clamp_(NVFP4_LEAST_SCALE, FP8_MAX), 1.0)
        steps = (scales * self.tensor_scales[:, None]).unsqueeze(2)
        values: Tensor = round_to_e2m1(weight.unflatten(1, (-1, NVFP4_BLOCK)) / steps).mul_(steps).flatten(1)
        return values

    def stored(self, levels: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        scales = (steps / self.tensor_scales[:, None]).to(torch.float8_e4m3fn)
        one = torch.ones((), device=levels.device)
        return quantize_nvfp4((levels.float() * self.unit).contiguous(), torch.ones_like(scales), one), scales

    def fitted(self, weight: Tensor, weights: Tensor) -> "Nvfp4Grid":
        return self

    def of_rows(self, rows: slice | Tensor) -> "Nvfp4Grid":
        return replace(self, tensor_scales=self.tensor_scales[rows])


def _largest(columns: Tensor) -> Tensor:
    return torch.maximum(columns.amax(dim=0), columns.amin(dim=0).neg_())


def _best_of(grid: Grid, columns: Tensor, weights: Tensor, candidates: Tensor) -> Tensor:
    """(out,) the first of the steps `candidates` (count, out) with the least squared error in `columns`."""
    kernels = rounding_kernels(columns.device)
    if kernels is not None:
        return kernels.best_steps(grid.levels, columns.contiguous(), weights, candidates)
    found = []
    for rows, steps in zip(columns.split(_ROWS, dim=1), candidates.split(_ROWS, dim=1), strict=True):
        losses = [weights @ grid.round_(rows / step).mul_(step).sub_(rows).square_() for step in steps]
        found.append(steps.gather(0, torch.stack(losses).argmin(dim=0, keepdim=True))[0])
    return torch.cat(found)
