"""8-bit integers: rounding to them, and the CPU instructions that multiply them."""

import torch
from torch import Tensor


def round_to_int8(values: Tensor, scale: Tensor | float) -> Tensor:
    """int8 of values / scale, computed in float32, halves to even, saturating at -128 and 127."""
    return (values.float() / scale).round_().clamp_(-128, 127).to(torch.int8)


def multiplies_int8() -> bool:
    """Whether this CPU sums products of int8 in 32 bits: without VNNI, oneDNN's pairs of products overflow 16."""
    return torch.backends.mkldnn.is_available() and bool(torch.cpu._is_vnni_supported())
