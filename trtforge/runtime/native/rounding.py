"""The kernels for rounding with error compensation, as functions of tensors (source/rounding.cpp)."""

import ctypes
from typing import Literal

import torch
from torch import Tensor

from trtforge.runtime.native.bindings import TYPES, Native, native_for
from trtforge.runtime.native.structures import Refinement, Rounding, Steps

Levels = Literal["int4", "e2m1"]
GRIDS: dict[Levels, int] = {"int4": 0, "e2m1": 1}
LONGEST = 128
"""Maximum number of columns in a block."""


class RoundingKernels:
    """The kernels. All matrices are contiguous, on the CPU, and float32 unless stated otherwise."""

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
        """Round at most LONGEST `columns` (block, out), last column first; returns int8 levels (block, out).

        E2M1 levels are in halves. A column is rounded to its target: the column minus its row of `product` (block,
        out), minus the errors of the columns rounded before it, times its `shares`. Row j of `shares` (block, block) is
        that of the j-th column from the end, with one element for each column in the same reverse order. Fills in
        `errors`, the rounded values minus the columns, and `residuals`, the rounded values minus the targets; `product`
        has their dtype. `quanta` (block, out): the value of level 1. `ends` (block, out) int8: the level of a weight
        that is fixed, 0 for others.
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
        """Coordinate descent on the levels `found` (out, in), in place, with at most `sweeps` sweeps.

        Each level moves to its best value with all others fixed. `gradients` (out, in): half the derivatives of the
        output error tr(D H Dᵀ) at the given levels. `gram`: H (in, in) in the same dtype, float32 or bfloat16;
        `diagonal` (in,): its diagonal in float32. The value of level 1 in a column is the `steps` (out, count) of its
        group, `groups` (in,) int64, times its `scales` (in,). `ends` (out, in): as in `round_block`.
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
        """For each output, the step of `candidates` (count, out) with the least squared error of `columns` (group,
        out), weighted by `weights` (group,); the first one on a tie."""
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
    """The kernels for float32 tensors on this device, if available."""
    native = native_for(device, torch.float32)
    return None if native is None else RoundingKernels(native)


def _address(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()
