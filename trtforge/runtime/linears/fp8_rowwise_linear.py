"""FP8 row-wise linear layers: E4M3 weights with a scale per output channel, E4M3 activations with one per token.

Arithmetic of TensorRT-LLM's FP8_PER_CHANNEL_PER_TOKEN (quantization/layers.py `Fp8RowwiseLinear`, cpp quantizeToken).
"""

import torch
from torch import Tensor

from trtforge.core.number_limits import FP8_MAX
from trtforge.models.transforms import FP8_ROW_SCALE_MIN
from trtforge.runtime.linears.float8 import from_e4m3, round_to_e4m3
from trtforge.runtime.linears.linear import Linear, Placement, Stored, load_bias, matrix, with_bias
from trtforge.runtime.linears.weights import Weights


class Fp8RowwiseDense:
    """Weights and activations represented exactly in the compute type; sums are scaled afterwards."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        packed = {
            "weight": from_e4m3(stored.weight.view(torch.float8_e4m3fn), wide(dtype)),
            "per_channel_scale": stored.weights_scale.float(),
        }
        return with_bias(packed, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        multiply = matrix(weights.take(f"{prefix}.weight", *shape).to(place.device, wide(place.dtype)))
        scales = weights.take(f"{prefix}.per_channel_scale", shape[0]).to(place.device)
        vector = load_bias(weights, prefix, shape, place, bias)

        def linear(x: Tensor) -> Tensor:
            tokens = token_scales(x)
            y = multiply(round_to_e4m3(x, tokens).to(wide(x.dtype))) * tokens * scales
            y = y.to(x.dtype)
            return y if vector is None else y.add_(vector)

        return linear


def token_scales(x: Tensor) -> Tensor:
    """(tokens, 1) float32: amax of each token / 448, bounded below as in TensorRT-LLM's kernel."""
    return (x.float().abs().amax(dim=1, keepdim=True) / FP8_MAX).clamp_(min=FP8_ROW_SCALE_MIN)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The compute type, or float32 instead of float16, which unscaled sums could overflow."""
    return torch.float32 if dtype is torch.float16 else dtype
