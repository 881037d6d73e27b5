"""INT4 linear layers on CUDA, with weights in the tiles that `cuda.product_kernels` reads."""

import torch
from torch import Tensor
from torch.nn import functional

from trtforge.models.transforms import unpack_int4
from trtforge.runtime.cuda.fused import fused_for
from trtforge.runtime.cuda.products import MOST_ROWS, TILE, products_for
from trtforge.runtime.linears.int4_linear import check_sizes, load_prequant, packed_prequant
from trtforge.runtime.linears.int4_native import OFFSET
from trtforge.runtime.linears.linear import Linear, Placement, Stored, load_bias, with_bias
from trtforge.runtime.linears.weights import Weights


class Int4Tiled:
    """Few rows are multiplied with the codes; for many, the weights are expanded to bfloat16 in each call."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        codes = unpack_int4(stored.weight.view(torch.int8))
        groups = stored.weights_scale.shape[1]
        check_sizes(codes, groups, TILE)
        scales = stored.weights_scale.to(dtype).t().contiguous()
        packed = {"weight": tiles_of(codes, groups), "weights_scaling_factor": scales}
        return with_bias({**packed, **packed_prequant(stored, dtype)}, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        outputs, inputs = shape
        scales = weights.take(f"{prefix}.weights_scaling_factor").to(place.device)
        groups = len(scales)
        tiles = weights.take(f"{prefix}.weight", outputs // TILE, groups, TILE, inputs // groups // 2).to(place.device)
        vector = load_bias(weights, prefix, shape, place, bias)
        prequant = load_prequant(weights, prefix, shape, place)
        products, fused = products_for(place.device), fused_for(place.device, place.dtype)
        if products is None or fused is None:
            return _by_torch(tiles, scales, inputs, vector, prequant)
        counters = products.new_counters()

        def linear(x: Tensor) -> Tensor:
            if len(x) == 1:
                return products.int4(x, tiles, scales, vector, counters, prequant)
            if prequant is not None:
                x = fused.scale_columns(x, prequant)
            if len(x) <= MOST_ROWS:
                return products.int4(x, tiles, scales, vector, counters)
            return functional.linear(x, products.expand_int4(tiles, scales, inputs), vector)

        return linear


def _by_torch(tiles: Tensor, scales: Tensor, inputs: int, bias: Tensor | None, prequant: Tensor | None) -> Linear:
    """The layer without kernels: the weights are expanded in each call."""

    def linear(x: Tensor) -> Tensor:
        scaled = x if prequant is None else x * prequant
        return functional.linear(scaled, values_of(tiles, scales, inputs), bias)

    return linear


def tiles_of(codes: Tensor, groups: int) -> Tensor:
    """int8 codes (outputs, inputs) in -8..7 as int8 (outputs / TILE, groups, TILE, inputs / groups / 2)."""
    outputs, inputs = codes.shape
    halves = (codes + OFFSET).to(torch.uint8).view(outputs // TILE, TILE, groups, 2, inputs // groups // 2)
    low, high = halves.unbind(3)
    return (low | (high << 4)).transpose(1, 2).contiguous().view(torch.int8)


def values_of(tiles: Tensor, scales: Tensor, inputs: int) -> Tensor:
    """(outputs, inputs) values in the type of the scales, by torch's operations."""
    codes = tiles.view(torch.uint8).transpose(1, 2)  # (tiles, TILE, groups, half)
    both = torch.stack((codes & 15, codes >> 4), dim=3).to(torch.int8) - OFFSET
    groups, outputs = scales.shape
    grouped = both.view(outputs, groups, inputs // groups).to(scales.dtype)
    return (grouped * scales.t().unsqueeze(2)).view(outputs, inputs)
