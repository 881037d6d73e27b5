"""INT8 rounding, and detection of the CPU's INT8 instructions."""

import torch
from torch import Tensor


def round_to_int8(values: Tensor, scale: Tensor | float) -> Tensor:
    """int8 of values / scale, computed in float32, halves to even, saturating at -128 and 127."""
    return (values.float() / scale).round_().clamp_(-128, 127).to(torch.int8)


def multiplies_int8() -> bool:
    """Whether this CPU sums int8 products in 32 bits (VNNI). Without it, oneDNN's 16-bit sums of pairs overflow."""
    return torch.backends.mkldnn.is_available() and bool(torch.cpu._is_vnni_supported())
