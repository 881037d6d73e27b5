"""The int32 words of AutoAWQ, GPTQ and compressed-tensors in TensorRT-LLM's bytes, and FP8 weights in another scale.

A word holds eight unsigned 4-bit codes, lowest nibble first, of which 8 means zero; the target's byte holds two signed
ones of neighbouring outputs (`transforms.pack_int4`). Nibbles are moved byte by byte, many times as fast as one by one.
Orders: AutoAWQ awq/utils/packing_utils.py, AutoGPTQ qlinear_cuda.py, compressed-tensors `pack_to_int32`.
"""

import torch
from torch import Tensor

from trtforge.models.transforms import quantize_fp8

_SIGN = 0x88  # unsigned code - 8 is the code with its highest bit turned, in both nibbles


def repack_awq(words: Tensor) -> Tensor:
    """(4 x rows, in) int8 of (rows, in) words: row r of the words holds outputs 8r to 8r + 7, in the order 02461357."""
    rows, inputs = words.shape
    split = _bytes(words).view(rows, inputs, 4).permute(2, 0, 1).contiguous()
    packed = torch.empty(rows, 4, inputs, dtype=torch.uint8)
    for byte in (0, 1):  # the even outputs are in a word's first two bytes, the odd ones in its last two
        _combine(split[byte], split[byte + 2], packed[:, 2 * byte], packed[:, 2 * byte + 1])
    return packed.flatten(0, 1).view(torch.int8)


def repack_gptq(words: Tensor) -> Tensor:
    """(rows / 2, 8 x columns) int8 of (rows, columns) words: column c of the words holds inputs 8c to 8c + 7."""
    even, odd = (_bytes(words[row::2]).view(len(words) // 2, -1) for row in (0, 1))
    packed = torch.empty(*even.shape, 2, dtype=torch.uint8)
    _combine(even, odd, packed[..., 0], packed[..., 1])
    return packed.flatten(1).view(torch.int8)


def _bytes(words: Tensor) -> Tensor:
    return words.contiguous().view(-1).view(torch.uint8)


def _combine(even: Tensor, odd: Tensor, low: Tensor, high: Tensor) -> None:
    """Bytes of the low nibbles of both, and of their high ones; `even` gives the low nibble of each."""
    torch.bitwise_xor((even & 0x0F) | (odd << 4), _SIGN, out=low)
    torch.bitwise_xor((even >> 4) | (odd & 0xF0), _SIGN, out=high)


def rescale_fp8(weight: Tensor, scale: Tensor, new_scale: Tensor) -> Tensor:
    """E4M3 weight x scale, rounded to E4M3 with `new_scale`, which is no smaller; equal scales change no byte."""
    if torch.equal(scale, new_scale):
        return weight
    return quantize_fp8(weight.float() * scale, new_scale)
