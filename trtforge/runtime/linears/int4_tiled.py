"""INT4 linear layers on CUDA, with weights in the tiles that `cuda.tile_kernels` reads: INT4-AWQ and W4A8-AWQ.

For sizes that the kernels do not support, and without Triton, weights are kept in the compute type.
"""

import torch
from torch import Tensor

from trtforge.models.kernels import PACKED_GROUPS, suits_tiles
from trtforge.models.transforms import unpack_int4
from trtforge.runtime.cuda.fused import fused_for
from trtforge.runtime.cuda.products import MOST_ROWS, TILE, Products, products_for
from trtforge.runtime.cuda.rounding import rounding_for
from trtforge.runtime.linears.float8 import round_to_e4m3
from trtforge.runtime.linears.int4_linear import Int4Dense, load_prequant, packed_prequant
from trtforge.runtime.linears.int4_native import OFFSET
from trtforge.runtime.linears.linear import Linear, Placement, Stored, load_bias, matrix, with_bias
from trtforge.runtime.linears.w4a8_linear import W4A8, group_scales, packed_factors
from trtforge.runtime.linears.weights import Weights


class Int4Tiled:
    """Few rows are multiplied with the codes; for many, the weights are expanded to bfloat16 in each call."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        codes = unpack_int4(stored.weight.view(torch.int8))
        if not _suits(codes, stored.weights_scale):
            return Int4Dense().pack(stored, dtype)
        packed = _packed_tiles(codes, stored.weights_scale.to(dtype))
        return with_bias({**packed, **packed_prequant(stored, dtype)}, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        if not _has_tiles(weights, prefix):
            return Int4Dense().load(weights, prefix, shape, place, bias=bias)
        tiles, scales = _take_tiles(weights, prefix, shape, place)
        vector = load_bias(weights, prefix, shape, place, bias)
        prequant = load_prequant(weights, prefix, shape, place)
        products, fused = products_for(place.device), fused_for(place.device, place.dtype)
        if products is None or fused is None:
            multiply = matrix(values_of(tiles, scales).to(place.dtype), vector)
            return multiply if prequant is None else lambda x: multiply(x * prequant)
        counters = products.new_counters(shape[0])

        def linear(x: Tensor) -> Tensor:
            if len(x) == 1:
                return products.int4(x, tiles, scales, vector, counters, prequant)
            if prequant is not None:
                x = fused.scale_columns(x, prequant)
            return _multiplied(products, x, tiles, scales, vector, counters)

        return linear


class W4A8Tiled:
    """Like `W4A8`, but the factor of the sums is multiplied into the groups' scales, which are float32."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        codes, scales = unpack_int4(stored.weight.view(torch.int8)), group_scales(stored)
        if not _suits(codes, scales):
            return W4A8(Int4Dense()).pack(stored, dtype)
        return with_bias({**_packed_tiles(codes, scales), **packed_factors(stored)}, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        if not _has_tiles(weights, prefix):
            return W4A8(Int4Dense()).load(weights, prefix, shape, place, bias=bias)
        tiles, scales = _take_tiles(weights, prefix, shape, place)
        scales = scales * weights.take_scalar(f"{prefix}.output_scaling_factor").to(place.device)
        input_scales = weights.take(f"{prefix}.input_scaling_factor", shape[1]).to(place.device)
        vector = load_bias(weights, prefix, shape, place, bias)
        products, rounding = products_for(place.device), rounding_for(place.device)
        if products is None or rounding is None:
            multiply = matrix(values_of(tiles, scales).to(place.dtype), vector)
            return lambda x: multiply(round_to_e4m3(x * input_scales, 1.0).to(x.dtype))
        counters, one = products.new_counters(shape[0]), torch.ones(1, device=place.device)

        def linear(x: Tensor) -> Tensor:
            numbers = rounding(x, "e4m3", one, input_scales)
            return _multiplied(products, numbers, tiles, scales, vector, counters)

        return linear


def _multiplied(
    products: Products, x: Tensor, tiles: Tensor, scales: Tensor, bias: Tensor | None, counters: Tensor
) -> Tensor:
    if len(x) <= MOST_ROWS:
        return products.int4(x, tiles, scales, bias, counters)
    return products.many_int4(x, tiles, scales, bias)


def _suits(codes: Tensor, scales: Tensor) -> bool:
    """Whether the kernels support codes (out, in) with scales (out, groups)."""
    return suits_tiles(*codes.shape) and codes.shape[1] // scales.shape[1] in PACKED_GROUPS


def _has_tiles(weights: Weights, prefix: str) -> bool:
    """Whether a layer was packed in tiles."""
    return weights.has(f"{prefix}.weights_scaling_factor")


def _packed_tiles(codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """`weight` in tiles and its scales (groups, out), from int8 codes (out, in) and scales (out, groups)."""
    return {"weight": tiles_of(codes, scales.shape[1]), "weights_scaling_factor": scales.t().contiguous()}


def _take_tiles(weights: Weights, prefix: str, shape: tuple[int, int], place: Placement) -> tuple[Tensor, Tensor]:
    """The tensors that `_packed_tiles` packed for a layer of `shape` (out, in), on their device."""
    outputs, inputs = shape
    scales = weights.take(f"{prefix}.weights_scaling_factor").to(place.device)
    groups = len(scales)
    tiles = weights.take(f"{prefix}.weight", outputs // TILE, groups, TILE, inputs // groups // 2)
    return tiles.to(place.device), scales


def tiles_of(codes: Tensor, groups: int) -> Tensor:
    """int8 codes (outputs, inputs) in -8..7 as int8 (outputs / TILE, groups, TILE, inputs / groups / 2)."""
    outputs, inputs = codes.shape
    halves = (codes + OFFSET).to(torch.uint8).view(outputs // TILE, TILE, groups, 2, inputs // groups // 2)
    low, high = halves.unbind(3)
    return (low | (high << 4)).transpose(1, 2).contiguous().view(torch.int8)


def values_of(tiles: Tensor, scales: Tensor) -> Tensor:
    """(outputs, inputs) values in the type of the scales (groups, outputs), by torch's operations."""
    codes = tiles.view(torch.uint8).transpose(1, 2)  # (tiles, TILE, groups, half)
    both = torch.stack((codes & 15, codes >> 4), dim=3).to(torch.int8) - OFFSET
    groups, outputs = scales.shape
    grouped = both.view(outputs, groups, -1).to(scales.dtype)
    return (grouped * scales.t().unsqueeze(2)).view(outputs, -1)
