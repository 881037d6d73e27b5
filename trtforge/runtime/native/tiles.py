"""Weights as the kernels read them: tiles of 32 outputs, within which the outputs of a few inputs lie together."""

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
    """(out, in) weights as `Native.linear` takes them: (out / 32, in / 2, 32, 2)."""
    outputs, inputs = weight.shape
    return _placed(weight.reshape(outputs // TILE, TILE, inputs // 2, 2).permute(0, 2, 1, 3))


def pack_float32(weight: Tensor) -> Tensor:
    """(out, in) weights as `float32.linear` takes them: (out / 32, in, 32), rounded up and filled with zeros."""
    outputs, inputs = weight.shape
    packed = shared_pages((-(-outputs // TILE), inputs, TILE), weight.dtype)
    whole = outputs // TILE
    packed[:whole] = weight[: whole * TILE].view(whole, TILE, inputs).transpose(1, 2)
    if whole < len(packed):
        packed[whole, :, : outputs - whole * TILE] = weight[whole * TILE :].t()
    return packed


def pack_bytes(weight: Tensor) -> Tensor:
    """(out, in) numbers of 8 bits as the kernels take them: (out / 32, in / 4, 32, 4)."""
    outputs, inputs = weight.shape
    return _placed(weight.reshape(outputs // TILE, TILE, inputs // 4, 4).permute(0, 2, 1, 3))


def pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(out, in) int8 weights as `Int8Layer` has them, and their offsets."""
    return pack_bytes(weight), weight.sum(dim=1, dtype=torch.int32).mul_(-128)


def _placed(weight: Tensor) -> Tensor:
    """The same numbers, one after another, where the kernels read them fastest."""
    return shared_pages(weight.shape, weight.dtype).copy_(weight)
