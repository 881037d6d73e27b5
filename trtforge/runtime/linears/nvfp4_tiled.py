"""NVFP4 linear layers on CUDA, with weights and block scales in the tiles that `cuda.tile_kernels` reads.

They run on any GPU from SM 8.0, because values and activations are exact in bfloat16. For sizes that the kernels do not
support, and without Triton, weights are kept in the compute type.
"""

import torch
from torch import Tensor

from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.models.kernels import PACKED_GROUPS, suits_tiles
from trtforge.runtime.cuda.products import MOST_ROWS, TILE, products_for
from trtforge.runtime.cuda.rounding import rounding_for
from trtforge.runtime.linears.float8 import from_e4m3
from trtforge.runtime.linears.fp8_rowwise_linear import wide
from trtforge.runtime.linears.linear import Linear, Placement, Stored, load_bias, matrix, with_bias
from trtforge.runtime.linears.nvfp4_linear import Nvfp4Dense, by_numbers, halves_of, numbers_of_e2m1
from trtforge.runtime.linears.weights import Weights

_MOST_INPUTS = 128  # of a tile


class Nvfp4Tiled:
    """Few rows are multiplied with the codes; for many, the weights are expanded to bfloat16 in each call."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        assert stored.weights_scale_2 is not None
        assert stored.activation_scale is not None
        outputs, inputs = stored.weight.shape[0], 2 * stored.weight.shape[1]
        if not suits_tiles(outputs, inputs):
            return Nvfp4Dense().pack(stored, dtype)
        packed = {
            "weight": tiles_of(stored.weight, _group(inputs)),
            "weights_scaling_factor": blocks_of(stored.weights_scale, _group(inputs)),
            "activation_scaling_factor": stored.activation_scale,
            "output_scaling_factor": stored.weights_scale_2 * stored.activation_scale,
        }
        return with_bias(packed, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        if not suits_tiles(*shape):
            return Nvfp4Dense().load(weights, prefix, shape, place, bias=bias)
        outputs, inputs = shape
        group = _group(inputs)
        tiled = outputs // TILE, inputs // group, TILE
        tiles = weights.take(f"{prefix}.weight", *tiled, group // 2).to(place.device)
        blocks = weights.take(f"{prefix}.weights_scaling_factor", *tiled, group // NVFP4_BLOCK).to(place.device)
        activation_scale = weights.take_scalar(f"{prefix}.activation_scaling_factor").to(place.device)
        factor = weights.take_scalar(f"{prefix}.output_scaling_factor").to(place.device)
        vector = load_bias(weights, prefix, shape, place, bias)
        products, rounding = products_for(place.device), rounding_for(place.device)

        if products is None or rounding is None:
            multiply = matrix(values_of(tiles, blocks).to(wide(place.dtype)))
            return by_numbers(multiply, activation_scale, float(factor), vector)
        counters, scales = products.new_counters(shape[0]), factor.expand(outputs).contiguous()

        def linear(x: Tensor) -> Tensor:
            numbers = rounding(x, "nvfp4", activation_scale)
            if len(x) <= MOST_ROWS:
                return products.nvfp4(numbers, tiles, blocks, factor, vector, counters)
            return products.scale_sums(products.many_nvfp4(numbers, tiles, blocks), scales, None, vector)

        return linear


def _group(inputs: int) -> int:
    """Inputs of a tile."""
    return next(size for size in PACKED_GROUPS if size <= _MOST_INPUTS and inputs % size == 0)


def tiles_of(packed: Tensor, group: int) -> Tensor:
    """int8 (outputs / TILE, groups, TILE, group / 2) from bytes (outputs, inputs / 2), whose low half comes first."""
    outputs, inputs = packed.shape[0], 2 * packed.shape[1]
    low, high = halves_of(packed).view(outputs // TILE, TILE, inputs // group, 2, group // 2).unbind(3)
    return (low | (high << 4)).transpose(1, 2).contiguous().view(torch.int8)


def blocks_of(scales: Tensor, group: int) -> Tensor:
    """E4M3 scales (outputs, inputs / 16) as uint8 (outputs / TILE, groups, TILE, group / 16)."""
    blocks: Tensor = scales.view(torch.uint8).unflatten(1, (-1, group // NVFP4_BLOCK)).unflatten(0, (-1, TILE))
    return blocks.transpose(1, 2).contiguous()


def values_of(tiles: Tensor, blocks: Tensor) -> Tensor:
    """float32 (outputs, inputs): values times their blocks' scales, by torch's operations."""
    halves = tiles.view(torch.uint8).transpose(1, 2)  # (tiles, TILE, groups, half)
    codes = torch.stack((halves & 15, halves >> 4), dim=3).flatten(0, 1).flatten(1)  # (outputs, inputs)
    values = numbers_of_e2m1(codes)
    scales = from_e4m3(blocks.transpose(1, 2).flatten(0, 1).flatten(1).view(torch.float8_e4m3fn), torch.float32)
    scaled: Tensor = values.unflatten(1, (-1, NVFP4_BLOCK)) * scales.unsqueeze(2)
    return scaled.flatten(1)
