"""Linear layers on CUDA whose weights stay in 8 bits.

Weight-only INT8, SmoothQuant, row-wise FP8, and FP8 for GPUs without E4M3 products. Activations are rounded to numbers
that bfloat16 represents exactly. Few rows are multiplied with the codes, and their sums are scaled before they are
rounded; for many rows, the weights are expanded to bfloat16 in each call. Layers are packed as for the CPU kernels.
Without Triton, their weights are kept in the compute type.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.models.transforms import FP8_ROW_SCALE_MIN
from trtforge.runtime.cuda.products import MOST_ROWS, Products, products_for, readable
from trtforge.runtime.cuda.rounding import rounding_for
from trtforge.runtime.linears.byte_native import Fp8Native, Fp8RowwiseNative, Int8Native, repacked
from trtforge.runtime.linears.fp8_linear import Fp8Dense
from trtforge.runtime.linears.fp8_rowwise_linear import Fp8RowwiseDense, wide
from trtforge.runtime.linears.int8_linear import Int8Dense, SmoothQuant
from trtforge.runtime.linears.linear import Linear, Placement, Stored, load_bias
from trtforge.runtime.linears.weights import Weights

_MOST_SUMMED = 1024  # rows per product, because INT32 sums take four bytes each
_INT8_SIDE = 8  # torch's INT8 products need sizes that are multiples of it


@dataclass(frozen=True)
class CodesProduct:
    """y = x W^T * scales + b, for bfloat16 x (rows, in), 8-bit codes `weight` (out, in), float32 `scales` (out,)."""

    products: Products
    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    counters: Tensor

    @classmethod
    def of(cls, products: Products, weight: Tensor, scales: Tensor, bias: Tensor | None) -> "CodesProduct":
        """The product of tensors that are on the kernels' device."""
        return cls(products, readable(weight), scales.contiguous(), bias, products.new_counters(len(weight)))

    def __call__(self, x: Tensor, factors: Tensor | None = None) -> Tensor:
        """`factors` (rows,): multiply the sums of each row."""
        if len(x) <= MOST_ROWS:
            return self.products.codes(x, self.weight, self.scales, self.bias, self.counters, factors)
        sums = self.products.many_codes(x, self.weight)
        return self.products.scale_sums(sums, self.scales, factors, self.bias)

    def of_scaled_weights(self, x: Tensor) -> Tensor:
        """Like `__call__`, but for many rows the weights, not the sums, are scaled before they are rounded."""
        if len(x) <= MOST_ROWS:
            return self(x)
        return self.products.many_codes(x, self.weight, self.scales, self.bias)


class Int8Cuda(Int8Native):
    """Weight-only INT8."""

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        weight, scales = _weight(weights, prefix, shape), weights.take(f"{prefix}.per_channel_scale", shape[0])
        vector, products = load_bias(weights, prefix, shape, place, bias), products_for(place.device)
        if products is None:
            return repacked(Int8Dense(), Stored(weight, vector, scales), prefix, shape, place)
        return CodesProduct.of(products, weight.to(place.device), scales.to(place.device), vector).of_scaled_weights


class Fp8RowwiseCuda(Fp8RowwiseNative):
    """E4M3 weights with a scale per output channel, E4M3 activations with one per token."""

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        weight = _weight(weights, prefix, shape).view(torch.float8_e4m3fn)
        scales = weights.take(f"{prefix}.per_channel_scale", shape[0])
        vector, products = load_bias(weights, prefix, shape, place, bias), products_for(place.device)
        rounding = rounding_for(place.device)
        if products is None or rounding is None:
            return repacked(Fp8RowwiseDense(), Stored(weight, vector, scales), prefix, shape, place)
        product = CodesProduct.of(products, weight.to(place.device), scales.to(place.device), vector)
        return lambda x: product(*rounding.by_row(x, FP8_ROW_SCALE_MIN))


class Fp8Cuda(Fp8Native):
    """E4M3 weights and statically scaled E4M3 activations, with per-tensor scaling factors."""

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        weight = _weight(weights, prefix, shape)
        weights_scale = weights.take_scalar(f"{prefix}.weights_scaling_factor")
        activation_scale = weights.take_scalar(f"{prefix}.activation_scaling_factor")
        vector, products = load_bias(weights, prefix, shape, place, bias), products_for(place.device)
        rounding = rounding_for(place.device)
        if products is None or rounding is None:
            return repacked(Fp8Dense(), Stored(weight, vector, weights_scale, activation_scale), prefix, shape, place)
        scales, scale = (weights_scale * activation_scale).expand(shape[0]), activation_scale.to(place.device)
        product = CodesProduct.of(products, weight.to(place.device), scales.to(place.device), vector)
        return lambda x: product(rounding(x, "e4m3", scale))


class SmoothQuantCuda(SmoothQuant):
    """INT8 smoothed activations times INT8 weights; sums are scaled per output channel."""

    def __init__(self) -> None:
        super().__init__(integer=True)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        products, rounding = products_for(place.device), rounding_for(place.device)
        if products is None or rounding is None:
            return _smooth_quant_by_torch(weights, prefix, shape, place, bias=bias)
        weight = _weight(weights, prefix, shape).to(place.device)
        prequant = weights.take(f"{prefix}.prequant_scaling_factor", shape[1]).to(place.device)
        scale = weights.take_scalar(f"{prefix}.activation_scaling_factor").to(place.device)
        scales = weights.take(f"{prefix}.output_scaling_factor", shape[0]).to(place.device)
        vector = load_bias(weights, prefix, shape, place, bias)
        product = CodesProduct.of(products, weight, scales, vector)
        multiplies = not any(size % _INT8_SIDE for size in shape)

        def linear(x: Tensor) -> Tensor:
            numbers = rounding(x, "int8", scale, prequant)
            if len(x) <= MOST_ROWS or not multiplies:
                return product(numbers)
            y = x.new_empty(len(x), shape[0])
            parts = -(-len(x) // _MOST_SUMMED)
            for part, into in zip(numbers.tensor_split(parts), y.tensor_split(parts), strict=True):
                products.scale_sums(torch._int_mm(part.to(torch.int8), weight.t()), scales, None, vector, into)
            return y

        return linear


def _weight(weights: Weights, prefix: str, shape: tuple[int, int]) -> Tensor:
    return weights.take(f"{prefix}.weight", *shape)


def _smooth_quant_by_torch(
    weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool
) -> Linear:
    """The layer as `SmoothQuant(integer=False)` computes it on any device, from packed integer weights."""
    names = ["prequant_scaling_factor", "activation_scaling_factor", "output_scaling_factor"]
    packed = {f"{prefix}.{name}": weights.take(f"{prefix}.{name}") for name in names}
    packed[f"{prefix}.weight"] = _weight(weights, prefix, shape).to(wide(place.dtype))
    vector = load_bias(weights, prefix, shape, place, bias)
    if vector is not None:
        packed[f"{prefix}.bias"] = vector
    return SmoothQuant(integer=False).load(Weights.of(packed, prefix), prefix, shape, place, bias=vector is not None)
