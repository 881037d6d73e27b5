"""The arithmetic of MXFP4: bfloat16(E2M1 code x 2^(scale - 127)), two codes a byte, the first in the low bits.

As `transformers` computes it (integrations/mxfp4.py, `_convert_moe_packed_tensors`, 5.23), bit for bit.
"""

from functools import cache

import torch
from torch import Tensor

from trtforge.core.number_limits import E2M1_VALUES

_BIAS = 127


def dequantize(codes: memoryview, scales: memoryview, outputs: int) -> memoryview:
    """The bytes of a bfloat16 matrix (in, out), of `outputs` columns, from their codes and scales (out, in / 32)."""
    values, factors = _tables()
    pairs = values[torch.frombuffer(codes, dtype=torch.uint8).int()].view(len(scales), -1)
    pairs *= factors[torch.frombuffer(scales, dtype=torch.uint8).int()].unsqueeze(1)
    matrix = pairs.bfloat16().view(outputs, -1).T.contiguous()
    return matrix.view(torch.uint8).flatten().numpy().data


@cache
def _tables() -> tuple[Tensor, Tensor]:
    """float32: the two values of each byte (256, 2), the factor of each scale (256,)."""
    values = torch.tensor(E2M1_VALUES)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1), torch.pow(2.0, byte.int() - _BIAS)
