"""The kernels of compensated rounding as functions of float32 tensors (source/rounding.cpp)."""

import ctypes
from typing import Literal

import torch
from torch import Tensor

from trtforge.runtime.native.bindings import TYPES, Native, native_for
from trtforge.runtime.native.structures import Refinement, Rounding, Steps

Levels = Literal["int4", "e2m1"]
GRIDS: dict[Levels, int] = {"int4": 0, "e2m1": 1}
LONGEST = 128
"""Columns of a block."""


class RoundingKernels:
    """All matrices are contiguous, on the CPU."""

    def __init__(self, native: Native) -> None:
        self._functions = native.functions

    def round_block(
        self,
        levels: Levels,
        columns: Tensor,
        product: Tensor | None,
        shares: Tensor,
        quanta: Tensor,
        ends: Tensor | None,
        errors: Tensor,
        residuals: Tensor,
    ) -> Tensor:
        """(block, out) int8 levels, E2M1 in halves, of at most LONGEST `columns` (block, out), the last one first.

        Each is rounded to its target. Fills in `errors`, what the levels stand for less the columns, and `residuals`,
        the same less the targets; `product` has their dtype: (block, out) what is taken off before. `shares` (block,
        block): row j, counted from the last column as its elements are, says how much of the errors of those before it
        a column takes off. `quanta` (block, out): a level of one. `ends` (block, out) int8: the level of a weight that
        has no choice, else 0.
        """
        block, outputs = columns.shape
        assert block <= LONGEST
        found = torch.empty(block, outputs, dtype=torch.int8)
        given = Rounding(
            columns=_address(columns),
            product=None if product is None else _address(product),
            shares=_address(shares),
            quanta=_address(quanta),
            ends=None if ends is None else _address(ends),
            levels=_address(found),
            errors=_address(errors),
            residuals=_address(residuals),
            block=block,
            outputs=outputs,
        )
        self._functions.round_block(GRIDS[levels], TYPES[errors.dtype], ctypes.byref(given))
        return found

    def refine_(
        self,
        levels: Levels,
        found: Tensor,
        gradients: Tensor,
        gram: Tensor,
        diagonal: Tensor,
        scales: Tensor,
        groups: Tensor,
        steps: Tensor,
        ends: Tensor | None,
        sweeps: int,
    ) -> None:
        """Move levels `found` (out, in) to what is best with all others as they are, `sweeps` times at most.

        `gradients` (out, in): of the levels as they are, half of the derivatives of the output error tr(D H Dᵀ).
        `gram`: H (in, in) in their dtype, float32 or bfloat16, and its `diagonal` (in,) in float32. A level of one
        stands for the `steps` (out, count) of a column's group, `groups` (in,) int64, times the column's of the
        `scales` (in,). `ends` (out, in): as above.
        """
        outputs, inputs = found.shape
        given = Refinement(
            levels=_address(found),
            gradients=_address(gradients),
            gram=_address(gram),
            diagonal=_address(diagonal),
            scales=_address(scales),
            groups=_address(groups),
            steps=_address(steps),
            ends=None if ends is None else _address(ends),
            outputs=outputs,
            inputs=inputs,
            count=steps.shape[1],
            sweeps=sweeps,
        )
        self._functions.refine(GRIDS[levels], TYPES[gradients.dtype], ctypes.byref(given))

    def best_steps(self, levels: Levels, columns: Tensor, weights: Tensor, candidates: Tensor) -> Tensor:
        """(out,) the first of the steps `candidates` (count, out) with the least squared error of `columns`
        (group, out), by the `weights` (group,) of the columns."""
        group, outputs = columns.shape
        best = torch.empty(outputs)
        given = Steps(
            columns=_address(columns),
            weights=_address(weights),
            candidates=_address(candidates),
            best=_address(best),
            group=group,
            outputs=outputs,
            count=len(candidates),
        )
        self._functions.best_steps(GRIDS[levels], ctypes.byref(given))
        return best


def rounding_kernels(device: torch.device) -> RoundingKernels | None:
    """The kernels for float32 tensors on this device, if there are any."""
    native = native_for(device, torch.float32)
    return None if native is None else RoundingKernels(native)


def _address(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()
