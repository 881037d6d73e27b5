"""INT4-AWQ linear layers: signed 4-bit weights with a scale per group of inputs, and pre-quantisation scales."""

from collections.abc import Mapping

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.models.kernels import PACKED_GROUPS
from trtforge.models.transforms import dequantize_int4, unpack_int4
from trtforge.runtime.linears.linear import Linear, Placement, Stored, load_bias, matrix, with_bias
from trtforge.runtime.linears.weights import Weights

_OUTPUTS_OF_TILE = 64  # outputs per tile of the CPU kernels' layout
_MANY_ROWS = 128  # expanding the weights was measured to be faster from this number of rows
_KNOWN_LAYOUT = "AVX512"


class Int4Dense:
    """INT4-AWQ with weights dequantised to the compute type: the reference arithmetic."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        values = dequantize_int4(unpack_int4(stored.weight.view(torch.int8)), stored.weights_scale.float())
        return with_bias({"weight": values.to(dtype), **packed_prequant(stored, dtype)}, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        multiply = matrix(
            weights.take(f"{prefix}.weight", *shape).to(place.device, place.dtype),
            load_bias(weights, prefix, shape, place, bias),
        )
        prequant = load_prequant(weights, prefix, shape, place)
        return multiply if prequant is None else lambda x: multiply(x * prequant)


class Int4Packed:
    """INT4-AWQ with torch's CPU int4 kernel: bfloat16 activations, codes offset by 8.

    The kernel is the fastest for few rows and the slowest for many, where each call dequantises the weights instead.
    """

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        codes = unpack_int4(stored.weight.view(torch.int8)).to(torch.int32) + 8
        _check_sizes(codes, stored.weights_scale.shape[1])
        weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = stored.weights_scale.t()
        scales_and_zeros = torch.stack((scales, torch.zeros_like(scales)), dim=2).to(dtype).contiguous()
        return with_bias(
            {"weight": weight, "scales_and_zeros": scales_and_zeros, **packed_prequant(stored, dtype)}, stored, dtype
        )

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        weight = weights.take(f"{prefix}.weight").to(place.device)
        scales_and_zeros = weights.take(f"{prefix}.scales_and_zeros").to(place.device)
        vector = load_bias(weights, prefix, shape, place, bias)
        prequant = load_prequant(weights, prefix, shape, place)
        group = shape[1] // scales_and_zeros.shape[0]
        expands = torch.backends.cpu.get_cpu_capability() == _KNOWN_LAYOUT

        def linear(x: Tensor) -> Tensor:
            if prequant is not None:
                x = x * prequant
            if expands and len(x) >= _MANY_ROWS:
                y = x @ _expanded(weight, scales_and_zeros)
            else:
                y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, group, scales_and_zeros)
            return y if vector is None else y.add_(vector)

        return linear


def _expanded(weight: Tensor, scales_and_zeros: Tensor) -> Tensor:
    """(in, out) bfloat16 values of a weight in the CPU kernel's AVX512 layout.

    That layout (aten/src/ATen/native/cpu/int4mm_kernel.cpp) has tiles of 64 outputs: for every input 32 bytes, of
    which byte j has output j in its low and output j + 32 in its high nibble. To convert a code to bfloat16, it is put
    into the mantissa of 128, where bfloat16 has steps of 1; then 128 and the offset 8 are subtracted.
    """
    groups, outputs, _ = scales_and_zeros.shape
    tiles = weight.view(outputs // _OUTPUTS_OF_TILE, -1, _OUTPUTS_OF_TILE // 2).to(torch.int16)
    values = torch.empty(tiles.shape[1], outputs // _OUTPUTS_OF_TILE, _OUTPUTS_OF_TILE, dtype=torch.bfloat16)
    by_tile = values.transpose(0, 1)
    for nibbles, into in (
        (tiles & 15, by_tile[..., : _OUTPUTS_OF_TILE // 2]),
        (tiles >> 4, by_tile[..., _OUTPUTS_OF_TILE // 2 :]),
    ):
        torch.sub(nibbles.bitwise_or_(0x4300).view(torch.bfloat16), 128 + 8, out=into)
    values.view(groups, -1, outputs).mul_(scales_and_zeros[:, None, :, 0])
    return values.view(-1, outputs)


def _check_sizes(codes: Tensor, groups: int) -> None:
    """Raises ForgeError if torch's kernel does not support a layer with codes (outputs, inputs)."""
    outputs, inputs = codes.shape
    hint = "Convert to fewer tensor-parallel ranks, or compile with `--compute-dtype float32`."
    if outputs % _OUTPUTS_OF_TILE:
        raise ForgeError(
            f"an INT4 linear layer with {outputs} outputs on a rank: INT4 kernels need multiples of {_OUTPUTS_OF_TILE}",
            hint=hint,
        )
    if inputs // groups not in PACKED_GROUPS:
        raise ForgeError(
            f"an INT4 linear layer with {inputs} inputs on a rank: INT4 kernels need multiples of {PACKED_GROUPS[-1]}",
            hint=hint,
        )


def packed_prequant(stored: Stored, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """The pre-quantisation scale in the compute type, if the layer has one."""
    return {} if stored.prequant is None else {"prequant_scaling_factor": stored.prequant.to(dtype)}


def load_prequant(weights: Weights, prefix: str, shape: tuple[int, int], place: Placement) -> Tensor | None:
    """The pre-quantisation scale that `packed_prequant` packed, on its device; None without one."""
    name = f"{prefix}.prequant_scaling_factor"
    return weights.take(name, shape[1]).to(place.device, place.dtype) if weights.has(name) else None
