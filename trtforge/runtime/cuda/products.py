"""Products of few rows with weights on CUDA, which read the weights once, by Triton kernels if available.

Weights are floating-point numbers, 8-bit codes, or 4-bit codes in tiles.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trtforge.models.kernels import TILE_OUTPUTS
from trtforge.runtime.cuda.fused import COLUMNS
from trtforge.runtime.cuda.launcher import Launcher, launcher_for
from trtforge.runtime.cuda.triton_support import converts_e4m3, power_from, processors_of, runs_triton

TILE = TILE_OUTPUTS
"""Outputs in a tile of 4-bit weights."""
MOST_ROWS = 128
"""Maximum rows to multiply with codes directly: with more, dequantising the weights first is faster."""
MOST_EXPANDED = 1 << 26
"""Maximum weights to dequantise at once; more are dequantised in slices, which take 128 MB."""
_COUNTERS = 64  # per multiprocessor; products of one row that need more programs are not split
_COUNTERS_OF_ROWS = 4  # per multiprocessor, for products of several rows
_LEAST_GROUPS = 2  # input groups in a split
_INPUTS_OF_CODES = 128  # inputs in one step of a program, for 8-bit codes
_LEAST_SIDE = 8  # smallest dimension of a matrix product
_MOST_TOGETHER = 64  # maximum rows of a program
_FEW_OUTPUTS, _MANY_OUTPUTS = 2048, 4096  # outputs of a layer, for products of one row


def readable(codes: Tensor) -> Tensor:
    """8-bit codes as the kernels read them: contiguous, E4M3 as uint8."""
    return (codes.view(torch.uint8) if codes.dtype is torch.float8_e4m3fn else codes).contiguous()


@dataclass(frozen=True)
class _Shape:
    """Shape of the programs that multiply codes: outputs and rows of each, and the maximum number of input splits.

    `most_programs`: inputs are split up to this number of programs per multiprocessor. Measured with INT4 on an H200:
    one row in programs of 16 outputs, always with split inputs, took 10 to 20 % less time than in programs of 64.
    """

    outputs: int
    rows: int
    most_splits: int
    most_programs: int
    warps: int
    stages: int


def _shape_for(rows: int) -> _Shape:
    if rows == 1:
        return _Shape(TILE // 4, _LEAST_SIDE, most_splits=8, most_programs=2 * _COUNTERS, warps=1, stages=4)
    together = max(2 * _LEAST_SIDE, power_from(rows))
    if together < _MOST_TOGETHER:
        return _Shape(TILE, together, most_splits=4, most_programs=8, warps=4, stages=3)
    return _Shape(2 * TILE, _MOST_TOGETHER, most_splits=4, most_programs=2, warps=8, stages=3)


@dataclass(frozen=True)
class _RowShape:
    """Shape of the programs that multiply one row: outputs, inputs per step, and whether to load one step ahead."""

    outputs: int
    inputs: int
    warps: int
    ahead: bool


def _row_shape_for(outputs: int, size: int) -> _RowShape:
    """`size`: bytes of a weight. Tuned on an H200 with the layers of Llama 1B and 8B, in bfloat16 and FP8."""
    if size > 1 and outputs <= _MANY_OUTPUTS:
        return _RowShape(8, 1024, warps=8 if outputs <= _FEW_OUTPUTS else 4, ahead=True)
    if outputs <= _FEW_OUTPUTS:
        return _RowShape(2, 4096, warps=4, ahead=False)
    return _RowShape(4, 2048, warps=4, ahead=False)


class Products:
    """Launches `kernels`, the module `product_kernels`, and `tiles`, the module `tile_kernels`.

    `processors`: number of multiprocessors of the GPU.
    """

    def __init__(
        self, kernels: Any, tiles: Any, launch: Launcher, processors: int, device: torch.device, *, e4m3: bool
    ) -> None:
        """`e4m3`: whether the GPU has instructions to convert E4M3."""
        self._e4m3 = e4m3
        self._kernels = kernels
        self._tiles = tiles
        self._launch = launch
        self._processors = processors
        self._device = device

    def new_counters(self, outputs: int) -> Tensor:
        """Zeroed counters for `codes`, `int4` and `nvfp4` with this number of outputs; each product resets them to 0.

        Concurrent products need separate counters.
        """
        of_one_row = min(_COUNTERS * self._processors, -(-outputs // _shape_for(1).outputs))
        most = max(of_one_row, _COUNTERS_OF_ROWS * self._processors)
        return torch.zeros(most, dtype=torch.int32, device=self._device)

    def one_row(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        scales: Tensor | None = None,
        factor: Tensor | None = None,
    ) -> Tensor:
        """x W^T + bias (1, outputs), rounded to `dtype`, for x (1, inputs) and weight (outputs, inputs), contiguous.

        The weight has the dtype of x or is 8-bit codes; x may be E4M3. Sums are multiplied by scales (outputs,) and
        factor (1,).
        """
        outputs, inputs = weight.shape
        shape = _row_shape_for(outputs, weight.element_size())
        y = x.new_empty(1, outputs, dtype=dtype)
        self._launch(
            self._kernels.multiply_one,
            (-(-outputs // shape.outputs), 1, 1),
            x,
            weight,
            y if scales is None else scales,
            y if factor is None else factor,
            y if bias is None else bias,
            y,
            inputs,
            outputs,
            OUTPUTS=shape.outputs,
            INPUTS=shape.inputs,
            AHEAD=shape.ahead,
            CONVERTS=self._e4m3,
            SCALED=scales is not None,
            FACTORED=factor is not None,
            BIASED=bias is not None,
            warps=shape.warps,
        )
        return y

    def codes(
        self,
        x: Tensor,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        counters: Tensor,
        factors: Tensor | None = None,
    ) -> Tensor:
        """x W^T + bias (rows, outputs) for at most MOST_ROWS rows x and 8-bit codes (outputs, inputs), contiguous.

        `counters`: see `new_counters`. Sums are multiplied by scales (outputs,) and factors (rows,).
        """
        rows, (outputs, inputs) = len(x), weight.shape
        if rows == 1:
            return self.one_row(x, weight, bias, x.dtype, scales, factors)
        y = x.new_empty(rows, outputs)
        if not rows:
            return y
        shape, grid = self._programs(rows, outputs, inputs // _INPUTS_OF_CODES)
        self._launch(
            self._kernels.multiply_codes,
            grid,
            x,
            weight,
            scales,
            scales if factors is None else factors,
            y if bias is None else bias,
            y,
            _sums_of_splits(y, grid[2]),
            counters,
            rows,
            x.stride(0),
            inputs,
            outputs,
            OUTPUTS=shape.outputs,
            ROWS=shape.rows,
            INPUTS=_INPUTS_OF_CODES,
            SPLITS=grid[2],
            CONVERTS=self._e4m3,
            FACTORED=factors is not None,
            BIASED=bias is not None,
            warps=shape.warps,
            stages=shape.stages,
        )
        return y

    def many_codes(self, x: Tensor, weight: Tensor, scales: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Like `codes` for any number of rows, but the codes are multiplied by scales (outputs,) before the sum."""

        def expanded(own: slice) -> Tensor:
            return self.expand_codes(weight[own], None if scales is None else scales[own])

        return _by_slices(x, len(weight), expanded, bias)

    def expand_codes(self, weight: Tensor, scales: Tensor | None = None) -> Tensor:
        """bfloat16 values of 8-bit codes (outputs, inputs), contiguous, times scales (outputs,)."""
        outputs, inputs = weight.shape
        values = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=weight.device)
        self._launch(
            self._kernels.expand_codes,
            (outputs, -(-inputs // COLUMNS), 1),
            weight,
            values if scales is None else scales,
            values,
            inputs,
            COLUMNS=COLUMNS,
            CONVERTS=self._e4m3,
            SCALED=scales is not None,
        )
        return values

    def scale_sums(
        self,
        sums: Tensor,
        scales: Tensor,
        factors: Tensor | None,
        bias: Tensor | None,
        into: Tensor | None = None,
    ) -> Tensor:
        """sums (rows, outputs) * scales (outputs,) * factors (rows,) + bias, in bfloat16, contiguous.

        `into`: where to store the result if the sums are not bfloat16; bfloat16 sums are scaled in place.
        """
        rows, outputs = sums.shape
        y = sums if into is None else into
        self._launch(
            self._kernels.scale_sums,
            (rows, -(-outputs // COLUMNS), 1),
            sums,
            scales,
            scales if factors is None else factors,
            y if bias is None else bias,
            y,
            outputs,
            COLUMNS=COLUMNS,
            FACTORED=factors is not None,
            BIASED=bias is not None,
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
        """x W^T + bias (rows, outputs) for at most MOST_ROWS rows x and tiles of INT4 codes; scales (groups, outputs).

        `counters`: see `new_counters`. prescale (inputs,): factors of the inputs, only if there is one row.
        """
        return self._of_tiles(x, weight, scales, bias, counters, prescale, None)

    def nvfp4(
        self, x: Tensor, weight: Tensor, blocks: Tensor, factor: Tensor, bias: Tensor | None, counters: Tensor
    ) -> Tensor:
        """Like `int4` for NVFP4: `blocks` are block scales in tiles, and sums are multiplied by factor (1,)."""
        return self._of_tiles(x, weight, blocks, bias, counters, None, factor)

    def _of_tiles(
        self,
        x: Tensor,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        counters: Tensor,
        prescale: Tensor | None,
        factor: Tensor | None,
    ) -> Tensor:
        """`factor`: of NVFP4 weights; None if the codes are INT4."""
        rows, inputs = x.shape
        tiles, groups, _, half = weight.shape
        outputs = tiles * TILE
        y = x.new_empty(rows, outputs)
        if not rows:
            return y
        shape, grid = self._programs(rows, outputs, groups)
        self._launch(
            self._tiles.multiply_tiles,
            grid,
            x,
            weight,
            scales,
            x if prescale is None else prescale,
            x if factor is None else factor,
            y if bias is None else bias,
            y,
            _sums_of_splits(y, grid[2]),
            counters,
            rows,
            x.stride(0),
            inputs,
            outputs,
            TILE=TILE,
            HALF=half,
            OUTPUTS=shape.outputs,
            ROWS=shape.rows,
            SPLITS=grid[2],
            ONE=rows == 1,
            PRESCALED=prescale is not None,
            NVFP4=factor is not None,
            BIASED=bias is not None,
            warps=shape.warps,
            stages=shape.stages,
        )
        return y

    def many_int4(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """Like `int4`, for any number of rows."""

        def expanded(own: slice) -> Tensor:
            return self.expand_int4(weight[own.start // TILE : own.stop // TILE], scales[:, own])

        return _by_slices(x, len(weight) * TILE, expanded, bias)

    def many_nvfp4(self, x: Tensor, weight: Tensor, blocks: Tensor) -> Tensor:
        """Like `many_int4` for NVFP4, with block scales in tiles, without the factor of `nvfp4`."""

        def expanded(own: slice) -> Tensor:
            tiles = slice(own.start // TILE, own.stop // TILE)
            return self.expand_nvfp4(weight[tiles], blocks[tiles])

        return _by_slices(x, len(weight) * TILE, expanded, None)

    def expand_int4(self, weight: Tensor, scales: Tensor) -> Tensor:
        """bfloat16 values (outputs, inputs) of tiles of INT4 codes; scales (groups, outputs)."""
        return self._expanded(weight, scales, nvfp4=False)

    def expand_nvfp4(self, weight: Tensor, blocks: Tensor) -> Tensor:
        """Like `expand_int4` for NVFP4, with block scales in tiles."""
        return self._expanded(weight, blocks, nvfp4=True)

    def _expanded(self, weight: Tensor, scales: Tensor, *, nvfp4: bool) -> Tensor:
        tiles, groups, _, half = weight.shape
        outputs, inputs = tiles * TILE, groups * 2 * half
        values = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=weight.device)
        sizes = {"TILE": TILE, "HALF": half, "NVFP4": nvfp4}
        arguments = weight, scales, values, inputs, scales.stride(0)
        self._launch(self._tiles.expand_tiles, (tiles, groups, 1), *arguments, **sizes)
        return values

    def _programs(self, rows: int, outputs: int, groups: int) -> tuple[_Shape, tuple[int, int, int]]:
        """The shape of each program, and the grid: numbers of parts of the outputs, of the rows and of the inputs."""
        shape = _shape_for(rows)
        parts, many = -(-outputs // shape.outputs), -(-rows // shape.rows)
        return shape, (parts, many, self._splits(shape, parts * many, groups))

    def _splits(self, shape: _Shape, programs: int, groups: int) -> int:
        """Number of input splits, a power of two: enough programs to keep the GPU's memory busy."""
        wanted = min(shape.most_programs * self._processors // programs, groups // _LEAST_GROUPS, shape.most_splits)
        return 1 << max(0, wanted.bit_length() - 1)


def _sums_of_splits(y: Tensor, splits: int) -> Tensor:
    """Memory for the partial sums of y of each split; unused with one split."""
    return y if splits == 1 else y.new_empty(splits, *y.shape, dtype=torch.float32)


def _by_slices(x: Tensor, outputs: int, expanded: Callable[[slice], Tensor], bias: Tensor | None) -> Tensor:
    """x W^T + bias, with the weights of a slice of outputs from `expanded`: slices limit the memory for weights."""
    step = max(1, MOST_EXPANDED // (x.shape[1] * TILE)) * TILE
    if outputs <= step:
        return functional.linear(x, expanded(slice(0, outputs)), bias)
    y = x.new_empty(len(x), outputs)
    for first in range(0, outputs, step):
        own = slice(first, min(outputs, first + step))
        torch.mm(x, expanded(own).t(), out=y[:, own])
    return y if bias is None else y.add_(bias)


def products_for(device: torch.device) -> Products | None:
    """The kernels for tensors on this device, if available."""
    return _on_gpu(device.index or 0) if runs_triton(device) else None


@functools.cache
def _on_gpu(index: int) -> Products:
    from trtforge.runtime.cuda import product_kernels, tile_kernels

    device = torch.device("cuda", index)
    launch, processors = launcher_for(index), processors_of(index)
    return Products(product_kernels, tile_kernels, launch, processors, device, e4m3=converts_e4m3(index))
