"""FP8 linear layers: E4M3 weights and statically scaled E4M3 activations, with per-tensor scaling factors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.models.transforms import quantize_fp8
from trtforge.runtime.cuda.fused import FusedKernels, fused_for
from trtforge.runtime.cuda.products import Products, products_for, readable
from trtforge.runtime.cuda.triton_support import converts_e4m3
from trtforge.runtime.linears.float8 import from_e4m3, round_to_e4m3
from trtforge.runtime.linears.fp8_rowwise_linear import wide
from trtforge.runtime.linears.linear import Linear, Placement, Stored, load_bias, matrix, with_bias
from trtforge.runtime.linears.weights import Weights

_SIDE = 16  # torch multiplies E4M3 matrices whose sizes are multiples of it (ATen/native/cuda, `_scaled_mm`)


class Fp8Dense:
    """E4M3 weights and statically scaled E4M3 activations, both represented exactly in the compute type.

    The products are exact, and every CPU and CUDA matrix product sums them in float32; the sums are scaled afterwards.
    float32 replaces float16, in which unscaled sums overflow.
    """

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        assert stored.activation_scale is not None
        packed = {
            "weight": from_e4m3(_as_e4m3(stored.weight), wide(dtype)),
            "activation_scaling_factor": stored.activation_scale,
            "output_scaling_factor": stored.weights_scale * stored.activation_scale,
        }
        return with_bias(packed, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        multiply = matrix(weights.take(f"{prefix}.weight", *shape).to(place.device, wide(place.dtype)))
        activation_scale = weights.take_scalar(f"{prefix}.activation_scaling_factor").to(place.device)
        output_scale = float(weights.take_scalar(f"{prefix}.output_scaling_factor"))
        return _by_numbers(multiply, activation_scale, output_scale, load_bias(weights, prefix, shape, place, bias))


def _by_numbers(multiply: Linear, activation_scale: Tensor, output_scale: float, bias: Tensor | None) -> Linear:
    """A layer with E4M3 weights in the compute type; `output_scale`: the product of weight and activation scale."""

    def linear(x: Tensor) -> Tensor:
        y = multiply(round_to_e4m3(x, activation_scale).to(wide(x.dtype))).mul_(output_scale).to(x.dtype)
        return y if bias is None else y.add_(bias)

    return linear


class Fp8ScaledMatmul:
    """E4M3 times E4M3 by the tensor cores of compute capability 8.9 and above.

    On an older GPU, and for sizes that torch's product does not support, weights are kept in the compute type.
    """

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        assert stored.activation_scale is not None
        packed = {
            "weight": _as_e4m3(stored.weight),
            "weights_scaling_factor": stored.weights_scale,
            "activation_scaling_factor": stored.activation_scale,
        }
        return with_bias(packed, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        weights_scale = weights.take_scalar(f"{prefix}.weights_scaling_factor").to(place.device)
        activation_scale = weights.take_scalar(f"{prefix}.activation_scaling_factor").to(place.device)
        weight = weights.take(f"{prefix}.weight", *shape).to(place.device)
        factor, vector = weights_scale * activation_scale, load_bias(weights, prefix, shape, place, bias)
        if any(size % _SIDE for size in shape) or not _multiplies_e4m3(place.device):
            multiply = matrix(from_e4m3(weight, wide(place.dtype)))
            return _by_numbers(multiply, activation_scale, float(factor), vector)
        return ScaledMatmul(
            columns=weight.t(),
            weights_scale=weights_scale,
            activation_scale=activation_scale,
            factor=factor,
            bias=vector,
            dtype=place.dtype,
            fused=fused_for(place.device, place.dtype),
            products=products_for(place.device),
        )


def _multiplies_e4m3(device: torch.device) -> bool:
    """Whether torch multiplies E4M3 matrices on this device. On the CPU it does."""
    return device.type != "cuda" or converts_e4m3(device.index or 0)


@dataclass(frozen=True)
class ScaledMatmul:
    """y = x W^T + b in E4M3; `columns` (in, out) is W^T. x is of type `dtype`, or E4M3 of inputs / activation_scale.

    `factor` (1,): the product of both scales. A single row has a separate kernel that reads the weights once.
    """

    columns: Tensor
    weights_scale: Tensor
    activation_scale: Tensor
    factor: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    fused: FusedKernels | None
    products: Products | None

    def __call__(self, x: Tensor) -> Tensor:
        codes = x if x.dtype is torch.float8_e4m3fn else self._codes(x)
        if self.products is not None and len(x) == 1:
            return self.products.one_row(codes, readable(self.columns.t()), self.bias, self.dtype, None, self.factor)
        y = torch._scaled_mm(codes, self.columns, self.activation_scale, self.weights_scale, out_dtype=self.dtype)
        return y if self.bias is None else y.add_(self.bias)

    @property
    def input_scale(self) -> Tensor | None:
        """See `linear.input_scale`."""
        return None if self.fused is None else self.activation_scale

    def _codes(self, x: Tensor) -> Tensor:
        if self.fused is None:
            return quantize_fp8(x, self.activation_scale)
        return self.fused.quantize(x, self.activation_scale)


def _as_e4m3(weight: Tensor) -> Tensor:
    """View int8 weights as E4M3: TensorRT-LLM accepts the same bytes in either dtype."""
    return weight if weight.dtype is torch.float8_e4m3fn else weight.view(torch.float8_e4m3fn)
