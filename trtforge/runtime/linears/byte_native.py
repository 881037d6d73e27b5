"""Linear layers of 8-bit weights for the CPU kernels: FP8 with static or row-wise activation scales, weight-only INT8.

The weights stay in 8 bits. Without a compiler, or for sizes that the kernels do not support, they are kept in the
compute type.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.models.kernels import suits_cpu
from trtforge.models.transforms import FP8_ROW_SCALE_MIN
from trtforge.runtime.linears.fp8_linear import Fp8Dense, Fp8ScaledMatmul
from trtforge.runtime.linears.fp8_rowwise_linear import Fp8RowwiseDense
from trtforge.runtime.linears.int8_linear import Int8Dense
from trtforge.runtime.linears.linear import Kernel, Linear, Placement, Stored, float_bias, load_bias, with_bias
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.native.bindings import Native, native_for
from trtforge.runtime.native.expanded import ExpandedLayer, Format, Inputs, linear_expanded, row_scales
from trtforge.runtime.native.tiles import pack_bytes


class Fp8Native:
    """E4M3 weights and statically scaled E4M3 activations, with per-tensor scaling factors."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        return Fp8ScaledMatmul().pack(stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        weight = weights.take(f"{prefix}.weight", *shape)
        weights_scale = weights.take_scalar(f"{prefix}.weights_scaling_factor")
        activation_scale = weights.take_scalar(f"{prefix}.activation_scaling_factor")
        vector = load_bias(weights, prefix, shape, place, bias)
        kernels = _kernels(shape, place)
        if kernels is None:
            stored = Stored(weight, vector, weights_scale, activation_scale)
            return repacked(Fp8Dense(), stored, prefix, shape, place)
        layer = ExpandedLayer(
            "e4m3",
            pack_bytes(weight.view(torch.int8)),
            shape[0],
            bias=float_bias(vector),
            inputs="e4m3",
            activation_scale=float(activation_scale),
            factor=float(weights_scale * activation_scale),
        )
        return lambda x: linear_expanded(kernels, x, layer)


@dataclass(frozen=True)
class _ScaledByOutput:
    """Weights with a scale per output channel. `reference`: computes the layer if there are no CPU kernels for it."""

    reference: Kernel
    format: Format
    inputs: Inputs = "as they are"
    activation_scale: float = 1.0

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        packed = {"weight": stored.weight, "per_channel_scale": stored.weights_scale.float()}
        return with_bias(packed, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        weight = weights.take(f"{prefix}.weight", *shape)
        scales = weights.take(f"{prefix}.per_channel_scale", shape[0])
        vector = load_bias(weights, prefix, shape, place, bias)
        kernels = _kernels(shape, place)
        if kernels is None:
            return repacked(self.reference, Stored(weight, vector, scales), prefix, shape, place)
        layer = ExpandedLayer(
            self.format,
            pack_bytes(weight.view(torch.int8)),
            shape[0],
            scales=row_scales(scales),
            bias=float_bias(vector),
            inputs=self.inputs,
            activation_scale=self.activation_scale,
        )
        return lambda x: linear_expanded(kernels, x, layer)


class Fp8RowwiseNative(_ScaledByOutput):
    """E4M3 weights with a scale per output channel, E4M3 activations with one per token."""

    def __init__(self) -> None:
        super().__init__(Fp8RowwiseDense(), "e4m3", "e4m3 by row", FP8_ROW_SCALE_MIN)


class Int8Native(_ScaledByOutput):
    """Weight-only INT8 with a scale per output channel."""

    def __init__(self) -> None:
        super().__init__(Int8Dense(), "int8")


def _kernels(shape: tuple[int, int], place: Placement) -> Native | None:
    return native_for(place.device, place.dtype) if suits_cpu(*shape) else None


def repacked(kernel: Kernel, stored: Stored, prefix: str, shape: tuple[int, int], place: Placement) -> Linear:
    """The layer, packed for and computed by another kernel."""
    packed = {f"{prefix}.{name}": tensor for name, tensor in kernel.pack(stored, place.dtype).items()}
    return kernel.load(Weights.of(packed, prefix), prefix, shape, place, bias=stored.bias is not None)
