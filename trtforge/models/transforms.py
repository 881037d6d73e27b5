"""Quantisation arithmetic on slabs of a weight matrix. Shapes are (out, in); computed in float32.

Layouts: NVIDIA ModelOpt 0.37 export/quant_utils.py and TensorRT-LLM 0.17 quantization/layers.py.
"""

import torch
from torch import Tensor

from trtforge.core.dtypes import DTYPES
from trtforge.core.number_limits import E2M1_MAX, FP8_MAX, INT8_MAX, NVFP4_BLOCK
from trtforge.models.elementwise import choose_kernels

choose_kernels()  # here, because all code that computes with weights imports this module, and imports run in one thread

TORCH: dict[str, torch.dtype] = {dtype.name: getattr(torch, dtype.name) for dtype in DTYPES}
"""torch's dtypes by TensorRT-LLM's names."""
PRE_QUANT_SCALE_BOUNDS = (1e-4, 1e4)
"""Smallest and largest pre-quantization scale (ModelOpt model_calib.py)."""
INT4_MAX = 7.0
NVFP4_LEAST_SCALE = 2.0**-9
"""The smallest E4M3 value: no block scale rounds to zero."""


def fp8_scale(amax: Tensor) -> Tensor:
    """The scaling factor (dequantisation multiplier): amax / 448; 1 for an all-zero tensor."""
    scale = amax.float() / FP8_MAX
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantize_fp8(values: Tensor, scale: Tensor | float) -> Tensor:
    """float8_e4m3fn of values / scale, saturating at 448.

    Divides in float32: with bfloat16, up to 4 % of the bytes would differ.
    """
    return (values.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def int4_scales(weight: Tensor, group_size: int) -> Tensor:
    """(out, in / group_size) float32: amax of each block / 7; 1 for an all-zero block."""
    amax = weight.float().abs().unflatten(1, (-1, group_size)).amax(dim=2)
    return torch.where(amax > 0, amax / INT4_MAX, torch.ones_like(amax))


def quantize_int4(weight: Tensor, scales: Tensor) -> Tensor:
    """(out, in) int8 codes in [-8, 7] of weight / its block's scale, ties to even."""
    blocks = weight.float().unflatten(1, (scales.shape[1], -1))
    codes: Tensor = (blocks / scales.unsqueeze(2)).round_().clamp_(-8, 7).to(torch.int8)
    return codes.flatten(1)


def dequantize_int4(codes: Tensor, scales: Tensor) -> Tensor:
    """(out, in) float32 values of the codes."""
    values: Tensor = codes.float().unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(2)
    return values.flatten(1)


def pack_int4(codes: Tensor) -> Tensor:
    """(out / 2, in) int8: byte [j, k] holds row 2j in its low and row 2j + 1 in its high nibble."""
    return (codes[0::2] & 0x0F) | (codes[1::2] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """(2 x rows, in) int8 codes in [-8, 7] of `pack_int4`."""
    low, high = (packed << 4) >> 4, packed >> 4
    return torch.stack((low, high), dim=1).flatten(0, 1)


FP8_ROW_SCALE_MIN = 1.0 / (FP8_MAX * 512.0)
"""Smallest row scale of FP8_PER_CHANNEL_PER_TOKEN (tensorrt_llm/quantization/quantize.py, `fp8_rowwise_quantize`)."""


def int8_row_scales(weight: Tensor) -> Tensor:
    """(out,) float32: amax of each row / 127; 1 for an all-zero row."""
    amax = weight.float().abs().amax(dim=1)
    return torch.where(amax > 0, amax / INT8_MAX, torch.ones_like(amax))


def quantize_int8(weight: Tensor, scales: Tensor) -> Tensor:
    """(out, in) int8 of weight / its row's scale, ties to even, in [-128, 127]."""
    codes: Tensor = (weight.float() / scales.unsqueeze(1)).round_().clamp_(-128, 127).to(torch.int8)
    return codes


def fp8_row_scales(weight: Tensor) -> Tensor:
    """(out,) float32: amax of each row / 448, at least 1 / (448 x 512)."""
    return (weight.float().abs().amax(dim=1) / FP8_MAX).clamp_(min=FP8_ROW_SCALE_MIN)


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """NVFP4's per-tensor scale, beside the E4M3 block scales: amax / (6 x 448); 1 for an all-zero tensor."""
    scale = amax.float() / (E2M1_MAX * FP8_MAX)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def nvfp4_block_scales(weight: Tensor, global_scale: Tensor) -> Tensor:
    """(out, in / 16) float8_e4m3fn: amax of each block / (6 x global scale); 1 for an all-zero block.

    At least NVFP4_LEAST_SCALE (ModelOpt 0.47, qtensor/nvfp4_tensor.py).
    """
    amax = weight.float().abs().unflatten(1, (-1, NVFP4_BLOCK)).amax(dim=2)
    scales = amax / (E2M1_MAX * global_scale)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return scales.clamp_(NVFP4_LEAST_SCALE, FP8_MAX).to(torch.float8_e4m3fn)


def quantize_nvfp4(weight: Tensor, block_scales: Tensor, global_scale: Tensor) -> Tensor:
    """(out, in / 2) uint8: E2M1 codes of weight / (block scale x global scale), the even column in the low nibble."""
    steps = (block_scales.float() * global_scale).unsqueeze(2)
    scaled = (weight.float().unflatten(1, (-1, NVFP4_BLOCK)) / steps).flatten(1)
    magnitudes = scaled.abs().contiguous()
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
    codes = torch.searchsorted(bounds, magnitudes)
    for odd in (0.75, 1.75, 3.5):  # ties go to the even code
        codes += magnitudes == odd
    codes = (codes | (scaled < 0).to(codes.dtype) << 3).to(torch.uint8)
    packed: Tensor = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed
