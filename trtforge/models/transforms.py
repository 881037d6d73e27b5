"""The arithmetic of number formats on slabs of a weight matrix. Shapes are (out, in); float32 inside.

Layouts: NVIDIA ModelOpt 0.37 export/quant_utils.py and TensorRT-LLM 0.17 quantization/layers.py.
"""

import torch
from torch import Tensor

TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
"""Torch's types by TensorRT-LLM's names."""
FP8_MAX = 448.0  # largest finite E4M3 value
INT4_MAX = 7.0


def fp8_scale(amax: Tensor) -> Tensor:
    """The dequantisation multiplier for a largest magnitude: amax / 448; 1 for an all-zero tensor."""
    scale = amax.float() / FP8_MAX
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantize_fp8(values: Tensor, scale: Tensor | float) -> Tensor:
    """float8_e4m3fn of values / scale, saturating at 448.

    Divided in float32: in bfloat16 up to 4 % of the bytes would differ.
    """
    return (values.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def int4_scales(weight: Tensor, group_size: int) -> Tensor:
    """(out, in / group_size) float32: largest magnitude of each block / 7; 1 for an all-zero block."""
    amax = weight.float().abs().unflatten(1, (-1, group_size)).amax(dim=2)
    return torch.where(amax > 0, amax / INT4_MAX, torch.ones_like(amax))


def quantize_int4(weight: Tensor, scales: Tensor) -> Tensor:
    """(out, in) int8 codes in [-8, 7] of weight / its block's scale, halves to even."""
    blocks = weight.float().unflatten(1, (scales.shape[1], -1))
    codes: Tensor = (blocks / scales.unsqueeze(2)).round_().clamp_(-8, 7).to(torch.int8)
    return codes.flatten(1)


def dequantize_int4(codes: Tensor, scales: Tensor) -> Tensor:
    """(out, in) float32 values that the codes stand for."""
    values: Tensor = codes.float().unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(2)
    return values.flatten(1)


def pack_int4(codes: Tensor) -> Tensor:
    """(out / 2, in) int8: byte [j, k] holds row 2j in its low and row 2j + 1 in its high nibble."""
    return (codes[0::2] & 0x0F) | (codes[1::2] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """(2 x rows, in) int8 codes in [-8, 7] of `pack_int4`."""
    low, high = (packed << 4) >> 4, packed >> 4
    return torch.stack((low, high), dim=1).flatten(0, 1)
