"""Quantises weights to codes and scales as TensorRT-LLM does on loading a weight-only checkpoint (W8A16, W4A16).

Source: cpp/tensorrt_llm/kernels/cutlass_kernels/cutlass_preprocessors.cpp `symmetric_quantize`; which layers:
tensorrt_llm/models/convert_utils.py `weight_only_quantize_dict`.
"""

from typing import Literal

import torch
from torch import Tensor

Bits = Literal[4, 8]


def quantize_weight_only(weight: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """int8 codes of (..., out, in) weights, and (..., out) scales in the weights' type.

    Codes are computed with the float32 scale, products with the rounded one. A row of zeros has scale 0.
    """
    values = weight.float()
    half = 1 << (bits - 1)
    scales = values.abs().amax(dim=-1) / half
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = round_half_away(values / divisors.unsqueeze(-1)).clamp_(-half, half - 1)
    return codes.to(torch.int8), scales.to(weight.dtype)


def round_half_away(values: Tensor) -> Tensor:
    """The nearest integers, halves away from zero like C's round(); torch.round rounds halves to even."""
    whole = values.trunc()
    return whole + (values - whole).mul_(2).trunc_()
