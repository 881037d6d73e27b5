"""LayerNorm, and RMS norm whose weights differ in dtype from the activations, by the kernels (source/norms.cpp)."""

import torch
from torch import Tensor

from trtforge.runtime.native.bindings import TYPES, Native
from trtforge.runtime.native.structures import AnyNorm


def norm(kernels: Native, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, *, centred: bool) -> Tensor:
    """LayerNorm if `centred`, else RMS norm, over the last dimension of x (..., size).

    weight and bias: (size,), or (heads, size) for x (..., heads, size); in the dtype of x or float32.
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    inner = 1 if weight.dim() == 1 else len(weight)
    row = inner * x.shape[-1]
    _norm(kernels, (x, weight, bias, y), (x.numel() // row, row, row, inner), epsilon, centred)
    return y


def norm_heads(
    kernels: Native, heads: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, *, centred: bool
) -> None:
    """`norm` of `heads` (tokens, heads, size) in place, which may be a slice of a tensor with more heads."""
    sizes = len(heads), heads.stride(0), heads.stride(0), heads.shape[1]
    _norm(kernels, (heads, weight, bias, heads), sizes, epsilon, centred)


def _norm(
    kernels: Native,
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor],
    sizes: tuple[int, int, int, int],
    epsilon: float,
    centred: bool,
) -> None:
    x, weight, bias, y = tensors
    outer, stride, into, inner = sizes
    given = AnyNorm(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        outer=outer,
        stride=stride,
        into=into,
        inner=inner,
        size=x.shape[-1],
        pitch=0 if weight.dim() == 1 else weight.shape[1],
        epsilon=epsilon,
    )
    kernels.run("norm", TYPES[x.dtype], TYPES[weight.dtype], centred, given)
