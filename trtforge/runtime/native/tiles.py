"""Packs weights for the kernels: tiles of 32 outputs, in which the weights of a few inputs are contiguous."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.models.kernels import CPU_OUTPUTS
from trtforge.runtime.native.pages import shared_pages

TILE = CPU_OUTPUTS
"""Outputs of a packed weight's tile."""


@dataclass(frozen=True)
class Int8Layer:
    """A SmoothQuant layer. float32 `prequant` (in,), `scales` of the sums and `bias` (out,).

    `weight` and int32 `offsets` (out,): see source/integer.cpp and `pack_int8`.
    """

    weight: Tensor
    offsets: Tensor
    prequant: Tensor
    scales: Tensor
    bias: Tensor | None
    activation_scale: float


def pack_bfloat16(weight: Tensor) -> Tensor:
    """(out, in) weights packed for `Native.linear`: (out / 32, in / 2, 32, 2)."""
    return _packed_words(weight, 2)


def pack_float32(weight: Tensor) -> Tensor:
    """(out, in) weights packed for `float32.linear`: (out / 32 rounded up, in, 32), padded with zeros."""
    outputs, inputs = weight.shape
    packed = shared_pages((-(-outputs // TILE), inputs, TILE), weight.dtype)
    whole = outputs // TILE
    packed[:whole] = weight[: whole * TILE].view(whole, TILE, inputs).transpose(1, 2)
    if whole < len(packed):
        packed[whole, :, : outputs - whole * TILE] = weight[whole * TILE :].t()
    return packed


def pack_bytes(weight: Tensor) -> Tensor:
    """(out, in) 8-bit weights packed for the kernels: (out / 32, in / 4, 32, 4)."""
    return _packed_words(weight, 4)


def pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`Int8Layer.weight` and `Int8Layer.offsets` of (out, in) int8 weights."""
    return pack_bytes(weight), weight.sum(dim=1, dtype=torch.int32).mul_(-128)


def _packed_words(weight: Tensor, parts: int) -> Tensor:
    """(out, in) weights, `parts` of which are 32 bits: (out / 32, in / parts, 32, parts).

    The copy is in large pages, which the kernels read fastest. torch copies whole words several times as fast as parts.
    """
    outputs, inputs = weight.shape
    words = weight.contiguous().view(torch.int32).view(outputs // TILE, TILE, inputs // parts).transpose(1, 2)
    packed = shared_pages(words.shape, torch.int32).copy_(words)
    return packed.view(weight.dtype).view(*words.shape, parts)
