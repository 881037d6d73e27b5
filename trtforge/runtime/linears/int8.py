"""INT8 rounding, and detection of the CPU's INT8 instructions."""

import torch
from torch import Tensor

from trtforge.core.number_limits import INT8_MAX

_LEAST = 2.0**-100


def round_to_int8(values: Tensor, scale: Tensor | float) -> Tensor:
    """int8 of values / scale, computed in float32, halves to even, saturating at -128 and 127."""
    return (values.float() / scale).round_().clamp_(-128, 127).to(torch.int8)


def round_by_group(values: Tensor, group: int) -> Tensor:
    """float32 (..., in): each `group` of inputs as codes from -127 to 127, halves to even, times the group's scale, its
    amax / 127. Like llama.cpp's Q8_0 blocks, but the scale is not rounded; groups with an amax below 2^-100 become 0.
    """
    grouped = values.float().unflatten(-1, (-1, group))
    largest = grouped.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest < _LEAST, 0.0, torch.tensor(INT8_MAX, device=values.device) / largest)
    codes: Tensor = (grouped * inverse).round_()
    return codes.mul_(largest / INT8_MAX).flatten(-2)


def multiplies_int8() -> bool:
    """Whether this CPU sums int8 products in 32 bits (VNNI). Without it, oneDNN's 16-bit sums of pairs overflow."""
    return torch.backends.mkldnn.is_available() and bool(torch.cpu._is_vnni_supported())
