"""Repack int32 words of AutoAWQ, GPTQ and compressed-tensors into TensorRT-LLM's INT4 bytes; rescale FP8 weights.

A word holds eight unsigned 4-bit codes, lowest nibble first, with zero point 8. A target byte holds two signed codes
of neighbouring outputs (`transforms.pack_int4`). Working on whole bytes is many times faster than on single nibbles.
Orders: AutoAWQ awq/utils/packing_utils.py, AutoGPTQ qlinear_cuda.py, compressed-tensors `pack_to_int32`.
"""

import torch
from torch import Tensor

from trtforge.models.transforms import quantize_fp8

_SIGN = 0x88  # code ^ 8 is code - 8 in 4-bit two's complement; for both nibbles


def repack_awq(words: Tensor) -> Tensor:
    """(4 x rows, in) int8 from (rows, in) words; row r of the words holds outputs 8r to 8r + 7, ordered 02461357."""
    rows, inputs = words.shape
    split = _bytes(words).view(rows, inputs, 4).permute(2, 0, 1).contiguous()
    packed = torch.empty(rows, 4, inputs, dtype=torch.uint8)
    for byte in (0, 1):  # the even outputs are in a word's first two bytes, the odd ones in its last two
        _combine(split[byte], split[byte + 2], packed[:, 2 * byte], packed[:, 2 * byte + 1])
    return packed.flatten(0, 1).view(torch.int8)


def repack_gptq(words: Tensor) -> Tensor:
    """(rows / 2, 8 x columns) int8 from (rows, columns) words; column c of the words holds inputs 8c to 8c + 7."""
    even, odd = (_bytes(words[row::2]).view(len(words) // 2, -1) for row in (0, 1))
    packed = torch.empty(*even.shape, 2, dtype=torch.uint8)
    _combine(even, odd, packed[..., 0], packed[..., 1])
    return packed.flatten(1).view(torch.int8)


def _bytes(words: Tensor) -> Tensor:
    return words.contiguous().view(-1).view(torch.uint8)


def _combine(even: Tensor, odd: Tensor, low: Tensor, high: Tensor) -> None:
    """Write signed codes: `low` from the low nibbles of `even` and `odd`, `high` from the high ones, `even` first."""
    torch.bitwise_xor((even & 0x0F) | (odd << 4), _SIGN, out=low)
    torch.bitwise_xor((even >> 4) | (odd & 0xF0), _SIGN, out=high)


def rescale_fp8(weight: Tensor, scale: Tensor, new_scale: Tensor) -> Tensor:
    """E4M3 weight, requantised from `scale` to `new_scale` >= `scale`; unchanged if the scales are equal."""
    if torch.equal(scale, new_scale):
        return weight
    return quantize_fp8(weight.float() * scale, new_scale)
