"""Norms over the last dimension, by kernels if these are available."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trtforge.runtime.cuda.fused import FusedKernels, fused_for, step_kernels_for
from trtforge.runtime.native.bindings import native_for
from trtforge.runtime.native.norms import norm, norm_heads


class Norm(Protocol):
    """A norm over the last dimension."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def in_place(self, heads: Tensor) -> bool:
        """Normalise each head of (tokens, heads, size) in place; False, with nothing done, if no kernel does this."""


class RmsNorm:
    """x / rms(x) * weight."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._weight = weight
        self._epsilon = epsilon
        self._kernels = step_kernels_for(weight.device, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernels is not None:
            return self._kernels.rms_norm(x, self._weight, self._epsilon)
        return functional.rms_norm(x, self._weight.shape, self._weight, self._epsilon)

    def in_place(self, heads: Tensor) -> bool:
        if self._kernels is None or not _adjacent(heads):
            return False
        self._kernels.rms_norm_heads(heads, self._weight, self._epsilon)
        return True

    def into(self, x: Tensor, y: Tensor) -> None:
        """y = the norm of x, both (rows, size), which may be columns of wider tensors."""
        if self._kernels is not None:
            self._kernels.rms_norm_into(x, self._weight, self._epsilon, y)
        else:
            y.copy_(self(x))

    def of_sum(
        self, x: Tensor, change: Tensor | None, scale: float, code_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """x + scale * change and its norm, in one pass; None if no kernel computes both.

        `code_scale`: the norm may then be E4M3 codes of norm / code_scale, if that costs nothing.
        """
        kernels, weight, epsilon = self._kernels, self._weight, self._epsilon
        if kernels is None or not (x.is_contiguous() and (change is None or change.is_contiguous())):
            return None
        if isinstance(kernels, FusedKernels) and code_scale is not None:
            if change is None:
                return x, kernels.rms_norm_codes(x, weight, epsilon, code_scale)
            return kernels.add_rms_norm(x, change, weight, scale, epsilon, code_scale)
        return (x, self(x)) if change is None else kernels.add_rms_norm(x, change, weight, scale, epsilon)


class LayerNorm:
    """(x - mean) / deviation * weight + bias; weight (size,), or (heads, size) without bias for Cohere's head norms."""

    def __init__(self, weight: Tensor, bias: Tensor | None, epsilon: float) -> None:
        self._weight, self._bias = weight, bias
        self._epsilon = epsilon
        self._kernels = native_for(weight.device, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernels is not None:
            return norm(self._kernels, x, self._weight, self._bias, self._epsilon, centred=True)
        if self._weight.dim() == 1:
            return functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._epsilon)
        return functional.layer_norm(x, self._weight.shape[-1:], eps=self._epsilon) * self._weight

    def in_place(self, heads: Tensor) -> bool:
        if self._kernels is None or not _adjacent(heads):
            return False
        norm_heads(self._kernels, heads, self._weight, self._bias, self._epsilon, centred=True)
        return True


class _WideRmsNorm:
    """x / rms(x) * factor, with a float32 factor, for activations of another type."""

    def __init__(self, factor: Tensor, epsilon: float, dtype: torch.dtype) -> None:
        self._factor = factor
        self._epsilon = epsilon
        self._kernels = native_for(factor.device, dtype)
        self._fused = fused_for(factor.device, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernels is not None:
            return norm(self._kernels, x, self._factor, None, self._epsilon, centred=False)
        if self._fused is not None:
            return self._fused.rms_norm(x, self._factor, self._epsilon)
        return functional.rms_norm(x.float(), self._factor.shape, self._factor, self._epsilon).to(x.dtype)

    def in_place(self, heads: Tensor) -> bool:
        if not _adjacent(heads):
            return False
        if self._kernels is not None:
            norm_heads(self._kernels, heads, self._factor, None, self._epsilon, centred=False)
        elif self._fused is not None:
            self._fused.rms_norm_heads(heads, self._factor, self._epsilon)
        else:
            return False
        return True


def zero_centred(weight: Tensor, epsilon: float) -> Norm:
    """x / rms(x) * (1 + weight). The factor is float32, as 1 + weight is coarser than the weight."""
    factor, dtype = weight.float() + 1, weight.dtype
    return RmsNorm(factor, epsilon) if dtype is torch.float32 else _WideRmsNorm(factor, epsilon, dtype)


def _adjacent(heads: Tensor) -> bool:
    """Whether each token's heads are contiguous."""
    return heads.stride()[1:] == (heads.shape[2], 1)
