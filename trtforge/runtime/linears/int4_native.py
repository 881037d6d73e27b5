"""INT4-AWQ linear layers for the CPU kernels: integer weights, scales applied to float32 or integer sums.

The layout does not depend on the processor. Without a compiler, layers multiply with dequantised weights.
"""

import functools
import logging

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.models.kernels import PACKED_GROUPS
from trtforge.models.transforms import unpack_int4
from trtforge.runtime.linears.int4_linear import Int4Dense, load_prequant, packed_prequant
from trtforge.runtime.linears.int8 import round_by_group
from trtforge.runtime.linears.linear import Linear, Placement, Stored, float_bias, load_bias, matrix, with_bias
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.native.bindings import Native, native_for
from trtforge.runtime.native.compiler import kernels_wanted
from trtforge.runtime.native.expanded import ExpandedLayer, linear_expanded
from trtforge.runtime.native.tiles import TILE

_LOG = logging.getLogger(__name__)
OFFSET = 8  # a stored nibble is its value plus this


class Int4Native:
    """`weight`: 16-bit words of four inputs as source/matmul.cpp describes; `scales`: (out / 32, groups, 32).

    Layers of sizes that the kernels do not support use `Int4Dense`. `rounds`: the other layers round activations to 8
    bits (`round_by_group`), which processors multiply faster.
    """

    def __init__(self, *, rounds: bool = False) -> None:
        self._rounds = rounds

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        codes = unpack_int4(stored.weight.view(torch.int8))
        outputs, inputs = codes.shape
        if outputs % TILE or inputs // stored.weights_scale.shape[1] not in PACKED_GROUPS:
            return Int4Dense().pack(stored, dtype)
        scales = stored.weights_scale.float().view(outputs // TILE, TILE, -1).transpose(1, 2)
        packed = {"weight": pack_words(codes), "scales": scales.contiguous()}
        return with_bias(packed | dict(packed_prequant(stored, dtype)), stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        if not has_words(weights, prefix):
            return Int4Dense().load(weights, prefix, shape, place, bias=bias)
        words, scales = take_words(weights, prefix, shape)
        vector = load_bias(weights, prefix, shape, place, bias)
        prequant = load_prequant(weights, prefix, shape, place)
        return _linear(words, scales, vector, prequant, place, rounds=self._rounds)


def has_words(weights: Weights, prefix: str) -> bool:
    """Whether a layer was packed for the kernels."""
    return weights.has(f"{prefix}.scales")


def take_words(weights: Weights, prefix: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """`weight` and `scales` of a layer of `shape` (out, in). Raises ForgeError if they do not fit each other."""
    outputs, inputs = shape
    words = weights.take(f"{prefix}.weight", outputs // TILE, inputs // 4, TILE)
    scales = weights.take(f"{prefix}.scales")
    groups = scales.shape[1] if scales.dim() > 1 else 0
    fits = scales.shape == (outputs // TILE, groups, TILE) and groups and inputs // groups in PACKED_GROUPS
    if not fits or scales.dtype is not torch.float32:
        raise ForgeError(
            f"{weights.where}: {prefix}.scales has {scales.dtype} numbers of shape {tuple(scales.shape)}",
            hint="The engine is damaged: compile the checkpoint again.",
        )
    return words, scales


def _linear(
    words: Tensor, scales: Tensor, bias: Tensor | None, prequant: Tensor | None, place: Placement, *, rounds: bool
) -> Linear:
    kernels = native_for(place.device, place.dtype)
    if kernels is None:
        return _dequantised_linear(words, scales, bias, prequant, place, rounds=rounds)
    vector = float_bias(bias)
    if not rounds and not expands(kernels, place):
        return lambda x: kernels.linear_int4(x, words, scales, vector, prequant)
    factors = None if prequant is None else prequant.float()
    layer = ExpandedLayer(
        "int4",
        words,
        len(words) * TILE,
        scales=scales,
        bias=vector,
        prequant=factors,
        inputs="int8 by group" if rounds else "as they are",
    )
    return lambda x: linear_expanded(kernels, x, layer)


def _dequantised_linear(
    words: Tensor, scales: Tensor, bias: Tensor | None, prequant: Tensor | None, place: Placement, *, rounds: bool
) -> Linear:
    """The layer without kernels, because there is no compiler or because kernels are switched off."""
    if kernels_wanted():
        _warn_of_dequantising()
    multiply = matrix(_dequantised(words, scales).to(place.dtype), bias)
    if rounds:
        group = words.shape[1] * 4 // scales.shape[1]
        factors = 1.0 if prequant is None else prequant.float()
        return lambda x: multiply(round_by_group(x.float() * factors, group).to(x.dtype))
    return multiply if prequant is None else lambda x: multiply(x * prequant)


def expands(kernels: Native, place: Placement) -> bool:
    """Whether `linear_expanded` computes the layer: without bfloat16 products, or for another compute type."""
    return not kernels.multiplies or place.dtype is not torch.bfloat16


@functools.lru_cache(maxsize=1)
def _warn_of_dequantising() -> None:
    _LOG.warning(
        "the engine's INT4 weights are dequantised, because their kernels need a C++ compiler; "
        "`trtforge compile` on this machine packs them for kernels that need none"
    )


def pack_words(codes: Tensor) -> Tensor:
    """int8 codes (out, in) from -8 to 7 to int16 words (out / 32, in / 4, 32)."""
    outputs, inputs = codes.shape
    # out = (tile, half, output), in = (quad, pair, which); nibble = (pair, half), word = (output, which)
    parts = (codes.to(torch.int32) + OFFSET).view(outputs // TILE, 2, TILE // 2, inputs // 4, 2, 2)
    nibbles = parts.permute(0, 3, 2, 5, 4, 1).reshape(outputs // TILE, inputs // 4, TILE, 4)
    return (nibbles << torch.arange(0, 16, 4, dtype=torch.int32)).sum(-1).to(torch.int16)


def unpack_words(words: Tensor) -> Tensor:
    """The inverse of `pack_words`."""
    tiles, quads, _ = words.shape
    nibbles = (words.to(torch.int32).unsqueeze(-1) >> torch.arange(0, 16, 4, dtype=torch.int32)) & 15
    parts = nibbles.view(tiles, quads, TILE // 2, 2, 2, 2).permute(0, 5, 2, 1, 4, 3)
    return (parts.reshape(tiles * TILE, quads * 4) - OFFSET).to(torch.int8)


def _dequantised(words: Tensor, scales: Tensor) -> Tensor:
    codes = unpack_words(words).float()
    by_group = codes.view(len(scales), TILE, scales.shape[1], -1) * scales.transpose(1, 2).unsqueeze(-1)
    return by_group.view(codes.shape)
