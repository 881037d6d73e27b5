"""4-bit codes out of the int32 words of AutoAWQ, GPTQ and compressed-tensors, and FP8 weights brought to one scale.

A word holds eight unsigned codes, lowest nibble first; a code of 8 is zero. Orders: AutoAWQ awq/utils/packing_utils.py,
AutoGPTQ qlinear_cuda.py, compressed-tensors `pack_to_int32`.
"""

import torch
from torch import Tensor

from trtforge.models.transforms import quantize_fp8

CODES_PER_WORD = 8
_ZERO = 8
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # where the codes 0 to 7 are: AutoAWQ writes the order 0 2 4 6 1 3 5 7


def awq_codes(words: Tensor) -> Tensor:
    """(8 x rows, in) int8 codes in [-8, 7] of (rows, in) words: row r of the words holds outputs 8r to 8r + 7."""
    return torch.stack([_nibble(words, place) for place in _AWQ_NIBBLES], dim=1).flatten(0, 1)


def gptq_codes(words: Tensor) -> Tensor:
    """(out, 8 x columns) int8 codes in [-8, 7] of (out, columns) words: column c holds inputs 8c to 8c + 7."""
    return torch.stack([_nibble(words, place) for place in range(CODES_PER_WORD)], dim=2).flatten(1, 2)


def rescale_fp8(weight: Tensor, scale: Tensor, new_scale: Tensor) -> Tensor:
    """E4M3 weight x scale, rounded to E4M3 with `new_scale`, which is no smaller; equal scales change no byte."""
    if torch.equal(scale, new_scale):
        return weight
    return quantize_fp8(weight.float() * scale, new_scale)


def _nibble(words: Tensor, place: int) -> Tensor:
    return ((words >> (4 * place)) & 0x0F).to(torch.int8) - _ZERO
