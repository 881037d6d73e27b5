"""Linear layers as kernels compute them. Weights are (out, in), activations (tokens, in).

Each kernel packs a checkpoint's tensors (layouts: TensorRT-LLM quantization/layers.py, ModelOpt
export/quant_utils.py) and computes from the packed tensors, so that loading an engine converts nothing.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trtforge.models.kernels import suits_cpu
from trtforge.runtime.cuda.products import Products, products_for
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.native.bindings import Native, native_for
from trtforge.runtime.native.expanded import ExpandedLayer, Format, linear_expanded
from trtforge.runtime.native.float32 import linear
from trtforge.runtime.native.tiles import pack_bfloat16, pack_float32

EXPANDED: dict[torch.dtype, Format] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""The dtypes of unquantised weights that the CPU kernels expand."""


@dataclass(frozen=True)
class Stored:
    """One linear layer as a checkpoint stores it; which fields are set depends on its algorithm.

    `weights_scale`: FP8 (1,), or (out,) row-wise, INT8 (out,), INT4 (out, in / group), NVFP4 E4M3 (out, in / 16).
    `weights_scale_2` (1,): NVFP4 and W4A8. `activation_scale` (1,): for statically quantised activations.
    `prequant` (in,): pre-quantisation scale of the inputs, for AWQ and SmoothQuant.
    """

    weight: Tensor
    bias: Tensor | None = None
    weights_scale: Tensor | None = None
    activation_scale: Tensor | None = None
    prequant: Tensor | None = None
    weights_scale_2: Tensor | None = None


@dataclass(frozen=True)
class Placement:
    """Device and compute type of a rank."""

    device: torch.device
    dtype: torch.dtype


class Linear(Protocol):
    """A linear layer; adds its bias, if any."""

    def __call__(self, x: Tensor) -> Tensor: ...


def input_scale(linear: object) -> Tensor | None:
    """The scale (1,) if a linear layer, or a part that begins with one, also takes E4M3 codes of inputs / scale.

    The kernel that computes the inputs can then round them as well. None: only unrounded inputs are supported.
    """
    scale: Tensor | None = getattr(linear, "input_scale", None)
    return scale


class Kernel(Protocol):
    """A way to compute one kind of linear layer."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        """The packed tensors, named without their common prefix."""

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        """The layer of `shape` (out, in) from packed tensors; without `bias`, the caller adds a packed bias."""


def merged(parts: tuple[Stored, ...]) -> Stored | None:
    """Merge layers that have the same input; None if that would change their arithmetic."""
    first = parts[0]
    for part in parts[1:]:
        if not (_same(first.prequant, part.prequant) and _same(first.activation_scale, part.activation_scale)):
            return None
        if not _same(first.weights_scale_2, part.weights_scale_2):
            return None
    per_tensor = first.weights_scale is not None and first.weights_scale.numel() == 1
    if per_tensor and not all(_same(first.weights_scale, part.weights_scale) for part in parts):
        return None
    return Stored(
        weight=torch.cat([part.weight for part in parts]),
        bias=_cat([part.bias for part in parts]),
        weights_scale=first.weights_scale if per_tensor else _cat([part.weights_scale for part in parts]),
        activation_scale=first.activation_scale,
        prequant=first.prequant,
        weights_scale_2=first.weights_scale_2,
    )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


def _cat(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def with_bias(packed: dict[str, Tensor], stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
    """The packed tensors, and the bias if the layer has one."""
    return packed if stored.bias is None else packed | {"bias": stored.bias.to(dtype)}


def load_bias(weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, wanted: bool) -> Tensor | None:
    """The packed bias, if it exists and is `wanted`."""
    name = f"{prefix}.bias"
    return weights.take(name, shape[0]).to(place.device, place.dtype) if wanted and weights.has(name) else None


def float_bias(bias: Tensor | None) -> Tensor | None:
    """The bias in float32, as the CPU kernels need it."""
    return None if bias is None else bias.float()


def matrix(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """y = x W^T + b. On CPU, the weights are reordered once for the kernels that multiply them."""
    kernels = native_for(weight.device, weight.dtype)
    if kernels is not None and weight.dtype is torch.float32:
        return _float32_matrix(kernels, weight, bias)
    if weight.device.type == "cpu" and weight.dtype is torch.bfloat16:
        if kernels is not None and kernels.takes(weight):
            return native_matrix(kernels, weight, bias, by_products=True)
        if kernels is not None and not kernels.multiplies and suits_cpu(*weight.shape):
            return native_matrix(kernels, weight, bias, by_products=False)
        if _has_onednn_bfloat16():
            reordered = torch.ops.mkldnn._reorder_linear_weight(weight)
            return lambda x: _onednn(x, reordered, bias)
    products = products_for(weight.device)
    if products is not None:
        return GpuMatrix(products, weight, bias)
    return lambda x: functional.linear(x, weight, bias)


@dataclass(frozen=True)
class GpuMatrix:
    """y = x W^T + b. A single row has a separate kernel that reads the weights once."""

    products: Products
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return self.products.one_row(x, self.weight, self.bias, x.dtype)
        return functional.linear(x, self.weight, self.bias)

    def unrounded(self, x: Tensor) -> Tensor:
        """y in float32, without rounding the sums to the type of x."""
        if len(x) == 1:
            return self.products.one_row(x, self.weight, self.bias, torch.float32)
        if not x.is_cuda or x.dtype is torch.float32:
            return functional.linear(x, self.weight, self.bias).float()
        y = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True)
class NativeMatrix:
    """y = x W^T + b of 16-bit weights by the CPU kernels. `by_products`: by those that multiply bfloat16 directly, not
    by those that expand the weights in the processor's cache."""

    kernels: Native
    layer: ExpandedLayer
    by_products: bool

    def __call__(self, x: Tensor) -> Tensor:
        if self.by_products:
            return self.kernels.linear(x, self.layer.weight, self.layer.bias, self.layer.outputs)
        return linear_expanded(self.kernels, x, self.layer)


def native_matrix(kernels: Native, weight: Tensor, bias: Tensor | None, *, by_products: bool) -> NativeMatrix:
    """y = x W^T + b of weights whose type is in EXPANDED, or of bfloat16 `by_products`."""
    layer = ExpandedLayer(EXPANDED[weight.dtype], pack_bfloat16(weight), len(weight), bias=float_bias(bias))
    return NativeMatrix(kernels, layer, by_products)


def _float32_matrix(kernels: Native, weight: Tensor, bias: Tensor | None) -> Linear:
    packed, outputs = pack_float32(weight), len(weight)
    return lambda x: linear(kernels, x, packed, bias, outputs)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _has_onednn_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Dense:
    """Weights in the compute type."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        return with_bias({"weight": stored.weight.to(dtype)}, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        weight = weights.take(f"{prefix}.weight", *shape).to(place.device, place.dtype)
        return matrix(weight, load_bias(weights, prefix, shape, place, bias))
