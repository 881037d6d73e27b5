"""Linear layers as kernels compute them. Weights are (out, in), activations (tokens, in).

Each kernel packs a checkpoint's tensors (layouts: TensorRT-LLM quantization/layers.py, ModelOpt
export/quant_utils.py) and computes from the packed tensors, so that loading an engine converts nothing.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trtforge.runtime.linears.weights import Weights


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


class Matrix:
    """y = x W^T + b. On CPU, bfloat16 weights are reordered once for oneDNN, which else would do so in each call."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._blocked = weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and _has_onednn_bfloat16()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._blocked else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._blocked:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return functional.linear(x, self._weight, self._bias)


def _has_onednn_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Dense:
    """Weights in the compute type."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        return with_bias({"weight": stored.weight.to(dtype)}, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        weight = weights.take(f"{prefix}.weight", *shape).to(place.device, place.dtype)
        return Matrix(weight, load_bias(weights, prefix, shape, place, bias))
