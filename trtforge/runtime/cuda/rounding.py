"""Rounds activations to a number format on CUDA in one kernel, where torch's operations take several."""

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from trtforge.runtime.cuda.fused import COLUMNS
from trtforge.runtime.cuda.launcher import Launcher, launcher_for
from trtforge.runtime.cuda.triton_support import power_from, runs_triton

_COLUMNS_OF_WARP = 512  # if a program rounds a whole row
_KINDS = {"e4m3": 0, "int8": 1, "nvfp4": 2}


class Rounding:
    """Launches `kernels`, the module `rounding_kernels`. x: (rows, size), contiguous within a row."""

    def __init__(self, kernels: Any, launch: Launcher) -> None:
        self._kernels = kernels
        self._launch = launch

    def __call__(
        self, x: Tensor, format: Literal["e4m3", "int8", "nvfp4"], scale: Tensor, prescale: Tensor | None = None
    ) -> Tensor:
        """x * prescale (size,) / scale (1,), rounded to the format's values, which are exact in the dtype of x."""
        return self._rounded(x, _KINDS[format], COLUMNS, scale, prescale, 0.0, None)

    def by_row(self, x: Tensor, least: float) -> tuple[Tensor, Tensor]:
        """x / scales rounded to E4M3 values, and the scales (rows,): a row's amax / 448, but at least `least`."""
        tokens = torch.empty(len(x), dtype=torch.float32, device=x.device)
        return self._rounded(x, _KINDS["e4m3"], power_from(x.shape[1]), tokens, None, least, tokens), tokens

    def _rounded(
        self,
        x: Tensor,
        kind: int,
        columns: int,
        scale: Tensor,
        prescale: Tensor | None,
        least: float,
        tokens: Tensor | None,
    ) -> Tensor:
        """`tokens` (rows,): receives the rows' scales; None if all rows have one scale."""
        rows, size = x.shape
        y = x.new_empty(rows, size)
        if rows:
            self._launch(
                self._kernels.round_rows,
                (rows, -(-size // columns), 1),
                x,
                scale if prescale is None else prescale,
                scale,
                y,
                scale if tokens is None else tokens,
                x.stride(0),
                size,
                least,
                COLUMNS=columns,
                KIND=kind,
                PRESCALED=prescale is not None,
                BY_ROW=tokens is not None,
                warps=min(16, max(4, columns // _COLUMNS_OF_WARP)),
            )
        return y


def rounding_for(device: torch.device) -> Rounding | None:
    """The kernel for tensors on this device, if available."""
    return _on_gpu(device.index or 0) if runs_triton(device) else None


@functools.cache
def _on_gpu(index: int) -> Rounding:
    from trtforge.runtime.cuda import rounding_kernels

    return Rounding(rounding_kernels, launcher_for(index))
