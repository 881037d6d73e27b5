"""NVFP4 linear layers for the CPU kernels, which expand the weights in the processor's cache.

Without a compiler, or for sizes that the kernels do not support, weights are kept in the compute type.
"""

import torch
from torch import Tensor

from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.models.kernels import suits_cpu
from trtforge.runtime.linears.byte_native import repacked
from trtforge.runtime.linears.float8 import from_e4m3
from trtforge.runtime.linears.int4_native import OFFSET, pack_words, unpack_words
from trtforge.runtime.linears.linear import Linear, Placement, Stored, float_bias, load_bias, with_bias
from trtforge.runtime.linears.nvfp4_linear import Nvfp4Dense, halves_of
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.native.bindings import native_for
from trtforge.runtime.native.expanded import ExpandedLayer, linear_expanded
from trtforge.runtime.native.tiles import TILE


class Nvfp4Native:
    """`weight`: words of E2M1 codes in the layout of `Int4Native`; `scales`: block scales (out / 32, in / 16, 32)."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        assert stored.weights_scale_2 is not None
        assert stored.activation_scale is not None
        codes = halves_of(stored.weight)
        if not suits_cpu(*codes.shape):
            return Nvfp4Dense().pack(stored, dtype)
        scales = from_e4m3(stored.weights_scale.view(torch.float8_e4m3fn), torch.float32)
        packed = {
            "weight": pack_words(codes.to(torch.int8) - OFFSET),
            "scales": scales.unflatten(0, (-1, TILE)).transpose(1, 2).contiguous(),
            "activation_scaling_factor": stored.activation_scale,
            "weights_scaling_factor_2": stored.weights_scale_2,
        }
        return with_bias(packed, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        if not suits_cpu(*shape):
            return Nvfp4Dense().load(weights, prefix, shape, place, bias=bias)
        outputs, inputs = shape
        words = weights.take(f"{prefix}.weight", outputs // TILE, inputs // 4, TILE)
        scales = weights.take(f"{prefix}.scales", outputs // TILE, inputs // NVFP4_BLOCK, TILE)
        activation_scale = weights.take_scalar(f"{prefix}.activation_scaling_factor")
        second = weights.take_scalar(f"{prefix}.weights_scaling_factor_2")
        vector, kernels = load_bias(weights, prefix, shape, place, bias), native_for(place.device, place.dtype)
        if kernels is None:
            codes = (unpack_words(words) + OFFSET).view(torch.uint8)
            blocks = scales.transpose(1, 2).flatten(0, 1).to(torch.float8_e4m3fn)
            stored = Stored(codes[:, ::2] | (codes[:, 1::2] << 4), vector, blocks, activation_scale, None, second)
            return repacked(Nvfp4Dense(), stored, prefix, shape, place)
        layer = ExpandedLayer(
            "e2m1",
            words,
            outputs,
            scales=scales,
            bias=float_bias(vector),
            inputs="nvfp4",
            activation_scale=float(activation_scale),
            factor=float(second * activation_scale),
        )
        return lambda x: linear_expanded(kernels, x, layer)
