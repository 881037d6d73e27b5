"""The arithmetic of MXFP4: bfloat16(E2M1 code x 2^(scale - 127)), two codes per byte, the first in the low bits.

Bit for bit the same as in `transformers` (integrations/mxfp4.py, `_convert_moe_packed_tensors`, 5.23).
"""

from functools import cache

import torch
from torch import Tensor

from trtforge.core.number_limits import E2M1_VALUES

_BIAS = 127


def dequantize(codes: memoryview, scales: memoryview, outputs: int) -> memoryview:
    """The bytes of a bfloat16 matrix (in, out), of `outputs` columns, from their codes and scales (out, in / 32)."""
    blocks = torch.frombuffer(codes, dtype=torch.uint8).view(len(scales), -1)
    rows = torch.frombuffer(scales, dtype=torch.uint8).int() << 8
    pairs = _pairs().index_select(0, (rows.unsqueeze(1) + blocks).view(-1))
    matrix = pairs.view(torch.bfloat16).view(outputs, -1).T.contiguous()
    return matrix.view(torch.uint8).flatten().numpy().data


@cache
def _pairs() -> Tensor:
    """int32 (256 x 256,): the bits of the two values of each byte, for each scale."""
    values, byte = torch.tensor(E2M1_VALUES), torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
    factors = torch.pow(2.0, byte.int() - _BIAS)
    return (pairs * factors.view(-1, 1, 1)).bfloat16().view(torch.int32).flatten()
