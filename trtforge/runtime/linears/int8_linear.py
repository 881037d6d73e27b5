"""INT8 linear layers: weight-only, and SmoothQuant with statically scaled INT8 activations."""

import torch
from torch import Tensor

from trtforge.models.kernels import suits_cpu
from trtforge.runtime.linears.fp8_rowwise_linear import wide
from trtforge.runtime.linears.int8 import multiplies_int8, round_to_int8
from trtforge.runtime.linears.linear import Dense, Linear, Placement, Stored, float_bias, load_bias, matrix, with_bias
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.native.bindings import native_for
from trtforge.runtime.native.expanded import ExpandedLayer, linear_expanded, row_scales
from trtforge.runtime.native.tiles import Int8Layer, pack_bytes, pack_int8


class Int8Dense(Dense):
    """Weight-only INT8 with weights dequantised to the compute type."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        values = stored.weight.float() * stored.weights_scale.unsqueeze(1)
        return with_bias({"weight": values.to(dtype)}, stored, dtype)


class SmoothQuant:
    """W8A8_SQ_PER_CHANNEL: INT8 smoothed activations times INT8 weights; sums are scaled per output channel.

    `integer`: weights stay in INT8, for the CPU kernels and the CPU's INT8 instructions; otherwise they are in the
    compute type. Both give the same integer sums, up to the rounding of float32 and of the compute type.
    """

    def __init__(self, *, integer: bool) -> None:
        self._integer = integer

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        assert stored.activation_scale is not None
        assert stored.prequant is not None
        packed = {
            "weight": stored.weight if self._integer else stored.weight.to(wide(dtype)),
            "prequant_scaling_factor": stored.prequant.float(),
            "activation_scaling_factor": stored.activation_scale,
            "output_scaling_factor": stored.weights_scale * stored.activation_scale,
        }
        return with_bias(packed, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        weight = weights.take(f"{prefix}.weight", *shape)
        prequant = weights.take(f"{prefix}.prequant_scaling_factor", shape[1]).to(place.device)
        activation_scale = weights.take_scalar(f"{prefix}.activation_scaling_factor").to(place.device)
        output_scales = weights.take(f"{prefix}.output_scaling_factor", shape[0]).to(place.device)
        vector = load_bias(weights, prefix, shape, place, bias)
        kernels = native_for(place.device, place.dtype) if self._integer else None
        if kernels is not None and kernels.takes_int8(weight):
            layer = Int8Layer(*pack_int8(weight), prequant, output_scales, float_bias(vector), float(activation_scale))
            return lambda x: kernels.linear_int8(x, layer)
        if kernels is not None and suits_cpu(*shape):
            expanded = ExpandedLayer(
                "int8",
                pack_bytes(weight),
                shape[0],
                scales=row_scales(output_scales),
                bias=float_bias(vector),
                prequant=prequant,
                inputs="int8",
                activation_scale=float(activation_scale),
            )
            return lambda x: linear_expanded(kernels, x, expanded)
        multiply = self._product(weight, place)

        def linear(x: Tensor) -> Tensor:
            y = (multiply(round_to_int8(x * prequant, activation_scale)) * output_scales).to(x.dtype)
            return y if vector is None else y.add_(vector)

        return linear

    def _product(self, weight: Tensor, place: Placement) -> Linear:
        """The function from INT8 activations to unscaled sums."""
        if self._integer and multiplies_int8():
            columns = weight.to(place.device).t()
            return lambda codes: torch._int_mm(codes, columns)
        multiply = matrix(weight.to(place.device, wide(place.dtype)))
        return lambda codes: multiply(codes.to(wide(place.dtype)))
