"""W4A8-AWQ linear layers: INT4 weights with a scale for each group of inputs, statically scaled E4M3 activations.

As TensorRT-LLM loads them (models/modeling_utils.py `preprocess_perlayer_weights`): group scales / second scale in
float16, inputs times pre-quantisation scale / activation scale, sums times second scale x activation scale. The
quotient for inputs stays in float32 here, where TensorRT-LLM rounds it to the model's type.
"""

from dataclasses import replace

import torch
from torch import Tensor

from trtforge.runtime.linears.float8 import round_to_e4m3
from trtforge.runtime.linears.fp8_rowwise_linear import wide
from trtforge.runtime.linears.int4_native import Int4Native, expands, has_words, take_words
from trtforge.runtime.linears.linear import Kernel, Linear, Placement, Stored, float_bias, load_bias, with_bias
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.native.bindings import native_for
from trtforge.runtime.native.expanded import ExpandedLayer, linear_expanded


class W4A8:
    """E4M3 activations, exact in the compute type, times INT4 weights, computed by a W4A16 kernel."""

    def __init__(self, weights: Kernel) -> None:
        self._weights = weights

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        plain = replace(stored, bias=None, prequant=None, weights_scale=group_scales(stored))
        return with_bias(self._weights.pack(plain, wide(dtype)) | packed_factors(stored), stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        matrix = self._weights.load(weights, prefix, shape, replace(place, dtype=wide(place.dtype)), bias=False)
        input_scales = weights.take(f"{prefix}.input_scaling_factor", shape[1]).to(place.device)
        output_scale = float(weights.take_scalar(f"{prefix}.output_scaling_factor"))
        vector = load_bias(weights, prefix, shape, place, bias)

        def linear(x: Tensor) -> Tensor:
            y = matrix(round_to_e4m3(x * input_scales, 1.0).to(wide(x.dtype))).mul_(output_scale).to(x.dtype)
            return y if vector is None else y.add_(vector)

        return linear


def group_scales(stored: Stored) -> Tensor:
    """float32 (out, groups): the scales of the codes, divided by the second scale and rounded to float16."""
    assert stored.weights_scale is not None
    assert stored.weights_scale_2 is not None
    return (stored.weights_scale / stored.weights_scale_2).half().float()


def packed_factors(stored: Stored) -> dict[str, Tensor]:
    """The factors (in,) of the inputs before they are rounded, and the factor (1,) of the sums."""
    assert stored.weights_scale_2 is not None
    assert stored.activation_scale is not None
    assert stored.prequant is not None
    return {
        "input_scaling_factor": stored.prequant.float() / stored.activation_scale,
        "output_scaling_factor": stored.weights_scale_2 * stored.activation_scale,
    }


class W4A8Native(W4A8):
    """Like `W4A8`, but if the kernels expand INT4 weights (`linear_expanded`), they round the activations as well."""

    def __init__(self) -> None:
        super().__init__(Int4Native())

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        kernels = native_for(place.device, place.dtype)
        if kernels is None or not expands(kernels, place) or not has_words(weights, prefix):
            return super().load(weights, prefix, shape, place, bias=bias)
        words, scales = take_words(weights, prefix, shape)
        layer = ExpandedLayer(
            "int4",
            words,
            shape[0],
            scales=scales,
            bias=float_bias(load_bias(weights, prefix, shape, place, bias)),
            prequant=weights.take(f"{prefix}.input_scaling_factor", shape[1]),
            inputs="e4m3",
            factor=float(weights.take_scalar(f"{prefix}.output_scaling_factor")),
        )
        return lambda x: linear_expanded(kernels, x, layer)
