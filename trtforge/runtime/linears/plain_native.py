"""Linear layers of 16-bit weights for CPU kernels that compute in float32: half the memory, the same results."""

import torch
from torch import Tensor

from trtforge.models.kernels import suits_cpu
from trtforge.runtime.linears.linear import (
    EXPANDED,
    Dense,
    Linear,
    Placement,
    Stored,
    load_bias,
    matrix,
    native_matrix,
    with_bias,
)
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.native.bindings import native_for


class PlainNative:
    """Keeps weights that are 16-bit in the checkpoint; others, and sizes without kernels, are in the compute type."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        if stored.weight.dtype not in EXPANDED or not suits_cpu(*stored.weight.shape):
            return Dense().pack(stored, dtype)
        return with_bias({"weight": stored.weight}, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        weight = weights.take(f"{prefix}.weight", *shape)
        vector = load_bias(weights, prefix, shape, place, bias)
        kernels = native_for(place.device, place.dtype)
        if kernels is None or weight.dtype not in EXPANDED or not suits_cpu(*shape):
            return matrix(weight.to(place.device, place.dtype), vector)
        return native_matrix(kernels, weight, vector, by_products=False)
