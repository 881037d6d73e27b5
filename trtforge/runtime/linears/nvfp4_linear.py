"""NVFP4 linear layers: E2M1 weights and activations, an E4M3 scale per 16 inputs and a float32 scale per tensor.

Weights: ModelOpt qtensor/nvfp4_tensor.py. Activations: as TensorRT-LLM's kernel rounds them (cpp quantization.cuh,
`cvt_warp_fp16_to_fp4`).
"""

import torch
from torch import Tensor

from trtforge.core.number_limits import E2M1_MAX, E2M1_VALUES, NVFP4_BLOCK
from trtforge.runtime.linears.float8 import from_e4m3, round_to_e4m3
from trtforge.runtime.linears.fp8_rowwise_linear import wide
from trtforge.runtime.linears.linear import Linear, Placement, Stored, load_bias, matrix, with_bias
from trtforge.runtime.linears.weights import Weights


class Nvfp4Dense:
    """Values times their block scales, exact in the compute type; the per-tensor scales multiply the sums."""

    def pack(self, stored: Stored, dtype: torch.dtype) -> dict[str, Tensor]:
        assert stored.weights_scale is not None
        assert stored.weights_scale_2 is not None
        assert stored.activation_scale is not None
        blocks = from_e4m3(stored.weights_scale.view(torch.float8_e4m3fn), torch.float32)
        values = from_e2m1(stored.weight).unflatten(1, (-1, NVFP4_BLOCK)) * blocks.unsqueeze(2)
        packed = {
            "weight": values.flatten(1).to(wide(dtype)),
            "activation_scaling_factor": stored.activation_scale,
            "output_scaling_factor": stored.weights_scale_2 * stored.activation_scale,
        }
        return with_bias(packed, stored, dtype)

    def load(self, weights: Weights, prefix: str, shape: tuple[int, int], place: Placement, *, bias: bool) -> Linear:
        multiply = matrix(weights.take(f"{prefix}.weight", *shape).to(place.device, wide(place.dtype)))
        activation_scale = weights.take_scalar(f"{prefix}.activation_scaling_factor").to(place.device)
        output_scale = float(weights.take_scalar(f"{prefix}.output_scaling_factor"))
        return by_numbers(multiply, activation_scale, output_scale, load_bias(weights, prefix, shape, place, bias))


def by_numbers(multiply: Linear, activation_scale: Tensor, output_scale: float, bias: Tensor | None) -> Linear:
    """The layer; `multiply`: product with the weights' values times their block scales."""

    def linear(x: Tensor) -> Tensor:
        y = (multiply(round_to_nvfp4(x, activation_scale).to(wide(x.dtype))) * output_scale).to(x.dtype)
        return y if bias is None else y.add_(bias)

    return linear


def halves_of(packed: Tensor) -> Tensor:
    """uint8 (rows, 2 x columns): the halves of (rows, columns) bytes, the low half first."""
    pairs = packed.view(torch.uint8)
    return torch.stack((pairs & 0x0F, pairs >> 4), dim=2).flatten(1)


def from_e2m1(packed: Tensor) -> Tensor:
    """float32 (rows, 2 x columns) from (rows, columns) bytes with two codes each."""
    return numbers_of_e2m1(halves_of(packed))


def numbers_of_e2m1(codes: Tensor) -> Tensor:
    """The float32 numbers that codes from 0 to 15 stand for."""
    return torch.tensor(E2M1_VALUES, device=codes.device)[codes.long()]


def round_to_nvfp4(values: Tensor, scale: Tensor) -> Tensor:
    """values / scale as float32 (rows, columns), rounded to E2M1 times the E4M3 scale of each block of 16 columns."""
    blocks = (values.float() / scale).unflatten(1, (-1, NVFP4_BLOCK))
    block_scales = round_to_e4m3(blocks.abs().amax(dim=2, keepdim=True), E2M1_MAX)
    safe = torch.where(block_scales > 0, block_scales, torch.ones_like(block_scales))
    rounded = round_to_e2m1(blocks / safe) * block_scales
    return rounded.flatten(1)


def round_to_e2m1(values: Tensor) -> Tensor:
    """Rounded to two significant bits, steps of 0.5 below 2, halves to even, saturating at 6."""
    scaled = values.float().clamp(-E2M1_MAX, E2M1_MAX)
    power = scaled.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    magic = power.clamp_(min=1.0).mul_(1.5 * 2.0**22)
    return scaled.add_(magic).sub_(magic).clamp_(-E2M1_MAX, E2M1_MAX)
