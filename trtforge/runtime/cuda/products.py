"""Products of few rows on CUDA, for which the weights are read once: by Triton kernels, where there are any."""

import functools
from typing import Any

import torch
from torch import Tensor

from trtforge.runtime.cuda.launcher import Launcher, launcher_for
from trtforge.runtime.cuda.triton_support import power_from, processors_of, runs_triton

TILE = 64
"""Outputs of a tile of INT4 weights."""
MOST_ROWS = 128
"""Of products with INT4 weights as they are: more take longer than expanding the weights first."""
_PROGRAMS = 3  # for each multiprocessor, which keep its memory requests coming
_MOST_SPLITS = 8
_LEAST_GROUPS = 4  # of a split's inputs
_LEAST_SIDE = 16  # of a matrix product


class Products:
    """Launches `kernels`, the module `product_kernels`, on a GPU of this many multiprocessors, one product at a time."""

    def __init__(self, kernels: Any, launch: Launcher, processors: int, device: torch.device) -> None:
        self._kernels = kernels
        self._launch = launch
        self._processors = processors
        self._arrived = torch.zeros(_PROGRAMS * processors, dtype=torch.int32, device=device)

    def one_row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(1, outputs) of x (1, inputs) and weight (outputs, inputs) of its type, both contiguous."""
        return self._one(x, weight, bias, x, x, rows=4, columns=1024)

    def one_row_e4m3(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation_scale: Tensor, scale: Tensor
    ) -> Tensor:
        """As `one_row` of E4M3 weights; x is quantised by `activation_scale` (1,) as it is read."""
        return self._one(x, weight, bias, activation_scale, scale, rows=8, columns=512)

    def _one(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation_scale: Tensor,
        scale: Tensor,
        *,
        rows: int,
        columns: int,
    ) -> Tensor:
        outputs, inputs = weight.shape
        y = x.new_empty(1, outputs)
        self._launch(
            self._kernels.multiply_one,
            (-(-outputs // rows), 1, 1),
            x,
            weight,
            y if bias is None else bias,
            y,
            activation_scale,
            scale,
            inputs,
            outputs,
            OUTPUTS=rows,
            INPUTS=columns,
            E4M3=weight.dtype is torch.float8_e4m3fn,
            BIASED=bias is not None,
        )
        return y

    def int4(
        self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, prescale: Tensor | None = None
    ) -> Tensor:
        """(rows, outputs) of at most MOST_ROWS rows x (rows, inputs) and tiles of codes; scales (groups, outputs).

        prescale (inputs,): of one row only.
        """
        rows, inputs = x.shape
        groups, outputs = scales.shape
        y = x.new_empty(rows, outputs)
        if not rows:
            return y
        together = min(64, max(_LEAST_SIDE, power_from(rows)))
        own = TILE if together < 64 else 2 * TILE
        parts, many = -(-outputs // own), -(-rows // together)
        splits = self._splits(parts * many, groups)
        self._launch(
            self._kernels.multiply_int4,
            (parts, many, splits),
            x,
            weight,
            scales,
            scales if prescale is None else prescale,
            y if bias is None else bias,
            y,
            y if splits == 1 else x.new_empty(splits, rows, outputs, dtype=torch.float32),
            y if splits == 1 else self._arrived,
            rows,
            x.stride(0),
            inputs,
            outputs,
            TILE=TILE,
            HALF=inputs // groups // 2,
            OUTPUTS=own,
            ROWS=together,
            SPLITS=splits,
            ONE=rows == 1,
            PRESCALED=prescale is not None,
            BIASED=bias is not None,
            warps=4 if own == TILE else 8,
            stages=4,
        )
        return y

    def expand_int4(self, weight: Tensor, scales: Tensor, inputs: int) -> Tensor:
        """(outputs, inputs) bfloat16 values of tiles of codes."""
        groups, outputs = scales.shape
        values = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=weight.device)
        half = inputs // groups // 2
        grid = (outputs // TILE, groups, 1)
        self._launch(
            self._kernels.expand_int4, grid, weight, scales, values, inputs, outputs, TILE=TILE, HALF=half
        )
        return values

    def _splits(self, programs: int, groups: int) -> int:
        """Parts of the inputs, a power of two: enough programs to occupy the GPU."""
        wanted = min(_PROGRAMS * self._processors // programs, groups // _LEAST_GROUPS, _MOST_SPLITS)
        return 1 << max(0, wanted.bit_length() - 1)



def products_for(device: torch.device) -> Products | None:
    """The kernels for tensors on this device, if there are any."""
    return _on_gpu(device.index or 0) if runs_triton(device) else None


@functools.cache
def _on_gpu(index: int) -> Products:
    from trtforge.runtime.cuda import product_kernels

    return Products(product_kernels, launcher_for(index), processors_of(index), torch.device("cuda", index))
