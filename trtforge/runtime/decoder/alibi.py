"""ALiBi (Press et al. 2022): attention scores grow with the key's position, by a slope for each head.

Adding the same number to all scores of a query does not change its softmax, so the key's position can replace its
distance, as in transformers/models/bloom.
"""

import math

import torch
from torch import Tensor


class Alibi:
    """The bias of one rank's heads [first, first + count) of `num_heads`, times `scale`.

    `coarse`: in bfloat16, as transformers' Falcon computes it.
    """

    def __init__(
        self, num_heads: int, first: int, count: int, scale: float, coarse: bool, device: torch.device
    ) -> None:
        self._slopes = torch.tensor(slopes(num_heads)[first : first + count], device=device).unsqueeze(1)
        self._scale = scale
        self.coarse = coarse
        self.slopes = (self._slopes * scale).flatten()
        """float32 (heads,): a key's bias is its position times its head's slope, unless `coarse`."""

    def bias(self, keys: int) -> Tensor:
        """float32 (heads, keys) for keys at positions 0 to `keys` - 1."""
        positions = torch.arange(keys, device=self._slopes.device)
        if self.coarse:
            return (self._slopes.bfloat16() * positions.bfloat16()).float().mul_(self._scale)
        return self._slopes * positions * self._scale


def slopes(num_heads: int) -> list[float]:
    """A geometric sequence for a power of two; further heads get every second slope of the next power of two."""
    closest = 1 << (num_heads.bit_length() - 1)
    made = _geometric(closest, range(1, closest + 1))
    return made + _geometric(2 * closest, range(1, 2 * (num_heads - closest) + 1, 2))


def _geometric(heads: int, powers: range) -> list[float]:
    base = 2.0 ** -(2.0 ** -(math.log2(heads) - 3))
    return [base**power for power in powers]
