"""Products of few rows on CUDA, for which the weights are read once: by Triton kernels, where there are any."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtforge.runtime.cuda.launcher import Launcher, launcher_for
from trtforge.runtime.cuda.triton_support import power_from, processors_of, runs_triton

TILE = 64
"""Outputs of a tile of INT4 weights."""
MOST_ROWS = 128
"""Of products with INT4 weights as they are: more take longer than expanding the weights first."""
_COUNTERS = 4  # for each multiprocessor: products of more programs are not split
_LEAST_GROUPS = 2  # of a split's inputs
_LEAST_SIDE = 8  # of a matrix product
_MOST_TOGETHER = 64  # rows of a program
_OUTPUTS, _INPUTS = 8, 1024  # of a program's step where there is one row
_FEW_OUTPUTS = 2048  # of a layer: programs with more warps keep the memory busier


@dataclass(frozen=True)
class _Shape:
    """Of the programs that multiply INT4 weights: outputs and rows of one, and into how many parts inputs are split.

    `most_programs`: for each multiprocessor, up to which inputs are split. Measured on an H200.
    """

    outputs: int
    rows: int
    most_splits: int
    most_programs: int
    warps: int
    stages: int


def _shape_for(rows: int) -> _Shape:
    if rows == 1:
        return _Shape(TILE, _LEAST_SIDE, most_splits=8, most_programs=8, warps=4, stages=4)
    together = max(2 * _LEAST_SIDE, power_from(rows))
    if together < _MOST_TOGETHER:
        return _Shape(TILE, together, most_splits=4, most_programs=8, warps=4, stages=3)
    return _Shape(2 * TILE, _MOST_TOGETHER, most_splits=4, most_programs=2, warps=8, stages=3)


class Products:
    """Launches `kernels`, the module `product_kernels`, on a GPU of this many multiprocessors."""

    def __init__(self, kernels: Any, launch: Launcher, processors: int, device: torch.device) -> None:
        self._kernels = kernels
        self._launch = launch
        self._processors = processors
        self._device = device

    def new_counters(self) -> Tensor:
        """What `int4` takes: zeros, which every product leaves zero again. Products at the same time need their own."""
        return torch.zeros(_COUNTERS * self._processors, dtype=torch.int32, device=self._device)

    def one_row(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """(1, outputs), rounded to `dtype`, of x (1, inputs) and weight (outputs, inputs) of its type, contiguous."""
        outputs, inputs = weight.shape
        y = x.new_empty(1, outputs, dtype=dtype)
        self._launch(
            self._kernels.multiply_one,
            (-(-outputs // _OUTPUTS), 1, 1),
            x,
            weight,
            y if bias is None else bias,
            y,
            inputs,
            outputs,
            OUTPUTS=_OUTPUTS,
            INPUTS=_INPUTS,
            BIASED=bias is not None,
            warps=8 if outputs <= _FEW_OUTPUTS else 4,
        )
        return y

    def int4(
        self,
        x: Tensor,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        counters: Tensor,
        prescale: Tensor | None = None,
    ) -> Tensor:
        """(rows, outputs) of at most MOST_ROWS rows x (rows, inputs) and tiles of codes; scales (groups, outputs).

        `counters`: see `new_counters`. prescale (inputs,): of one row only.
        """
        rows, inputs = x.shape
        groups, outputs = scales.shape
        y = x.new_empty(rows, outputs)
        if not rows:
            return y
        shape = _shape_for(rows)
        parts, many = -(-outputs // shape.outputs), -(-rows // shape.rows)
        splits = self._splits(shape, parts * many, groups)
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
            counters,
            rows,
            x.stride(0),
            inputs,
            outputs,
            TILE=TILE,
            HALF=inputs // groups // 2,
            OUTPUTS=shape.outputs,
            ROWS=shape.rows,
            SPLITS=splits,
            ONE=rows == 1,
            PRESCALED=prescale is not None,
            BIASED=bias is not None,
            warps=shape.warps,
            stages=shape.stages,
        )
        return y

    def expand_int4(self, weight: Tensor, scales: Tensor, inputs: int) -> Tensor:
        """(outputs, inputs) bfloat16 values of tiles of codes."""
        groups, outputs = scales.shape
        values = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=weight.device)
        half = inputs // groups // 2
        grid = (outputs // TILE, groups, 1)
        self._launch(self._kernels.expand_int4, grid, weight, scales, values, inputs, outputs, TILE=TILE, HALF=half)
        return values

    def _splits(self, shape: _Shape, programs: int, groups: int) -> int:
        """Parts of the inputs, a power of two: enough programs to keep the GPU's memory busy."""
        wanted = min(shape.most_programs * self._processors // programs, groups // _LEAST_GROUPS, shape.most_splits)
        return 1 << max(0, wanted.bit_length() - 1)


def products_for(device: torch.device) -> Products | None:
    """The kernels for tensors on this device, if there are any."""
    return _on_gpu(device.index or 0) if runs_triton(device) else None


@functools.cache
def _on_gpu(index: int) -> Products:
    from trtforge.runtime.cuda import product_kernels

    return Products(product_kernels, launcher_for(index), processors_of(index), torch.device("cuda", index))
