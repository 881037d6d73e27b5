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
    outputs, inputs = weight.shape
    return _placed(weight.reshape(outputs // TILE, TILE, inputs // 2, 2).permute(0, 2, 1, 3))


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
    outputs, inputs = weight.shape
    return _placed(weight.reshape(outputs // TILE, TILE, inputs // 4, 4).permute(0, 2, 1, 3))


def pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`Int8Layer.weight` and `Int8Layer.offsets` of (out, in) int8 weights."""
    return pack_bytes(weight), weight.sum(dim=1, dtype=torch.int32).mul_(-128)


def _placed(weight: Tensor) -> Tensor:
    """A contiguous copy in large pages, which the kernels read fastest."""
    return shared_pages(weight.shape, weight.dtype).copy_(weight)
