"""Linear layers in the formats of TensorRT-LLM's checkpoints, and what they stand for.

Written from the formats' description alone: rounded to nearest, with activation scales that let a few inputs saturate.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quantised:
    """One linear layer (out, in) of a whole model.

    scales: (out,), or (out, in / group), stored as `scales_name`. scalars: tensors (1,) by name. values: float32
    weights that are meant, for what `rounded` makes of the layer's inputs. packed, paired: two outputs' or two inputs'
    codes lie in a byte.
    """

    codes: Tensor
    values: Tensor
    scales: Tensor | None = None
    prequant: Tensor | None = None
    scalars: Mapping[str, Tensor] = field(default_factory=dict)
    rounded: Callable[[Tensor], Tensor] = lambda x: x
    packed: bool = False
    paired: bool = False
    scales_name: str = "weights_scaling_factor"

    def part(self, rows: Tensor, columns: slice) -> dict[str, Tensor]:
        """The tensors of a rank, by what follows the module's name."""
        codes = self.codes[rows][:, columns]
        if self.packed:
            codes = (codes[0::2] & 15) | (codes[1::2] << 4)
        if self.paired:
            codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
        stored = {"weight": codes, **self.scalars}
        if self.scales is not None:
            scales = self.scales[rows]
            if scales.dim() == 2:
                group = self.codes.shape[1] // scales.shape[1]
                scales = scales[:, columns.start // group : columns.stop // group]
            stored[self.scales_name] = scales
        if self.prequant is not None:
            stored["prequant_scaling_factor"] = self.prequant[columns]
        return stored


def quantised(weight: Tensor, algorithm: str | None, group: int, dtype: torch.dtype, column_parts: int) -> Quantised:
    """A float32 weight in the format of a quant_algo, for a model of `dtype` whose ranks hold `column_parts` of it."""
    match algorithm:
        case "FP8":
            scale = torch.tensor([1.5 / 448])  # one scale for every part, as for fused linears
            codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            act = torch.tensor([6.0 / 448])
            scalars = {"weights_scaling_factor": scale, "activation_scaling_factor": act}
            return Quantised(codes, codes.float() * scale, scalars=scalars, rounded=lambda x: e4m3(x / act) * act)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            scales = weight.abs().amax(1) / 448
            codes = (weight / scales.unsqueeze(1)).to(torch.float8_e4m3fn)
            values = codes.float() * scales.unsqueeze(1)
            return Quantised(codes, values, scales, rounded=_by_token, scales_name="per_channel_scale")
        case "NVFP4":
            return _nvfp4(weight)
        case "W4A16_AWQ":
            codes, scales, prequant = _awq(weight, group, dtype)
            values = codes.float() * scales.repeat_interleave(group, dim=1)
            return Quantised(codes, values, scales, prequant, rounded=lambda x: x * prequant.float(), packed=True)
        case "W4A8_AWQ":
            codes, scales, prequant = _awq(weight, group, dtype)
            act, second = torch.tensor([5.0 / 448]), (weight / prequant.float()).abs().max().reshape(1) / 448
            values = codes.float() * (scales / second).half().float().repeat_interleave(group, dim=1) * second
            scalars = {"weights_scaling_factor_2": second, "activation_scaling_factor": act}
            inputs = prequant.float() / act
            return Quantised(
                codes, values, scales, prequant, scalars, rounded=lambda x: e4m3(x * inputs) * act, packed=True
            )
        case "W8A8_SQ_PER_CHANNEL":
            prequant = _prequant(weight, dtype)
            folded = weight / prequant.float()
            scales, act = folded.abs().amax(1) / 127, torch.tensor([5.0 / 127])
            codes = (folded / scales.unsqueeze(1)).round().clamp(-128, 127).to(torch.int8)

            def rounded(x: Tensor) -> Tensor:
                return (x * prequant.float() / act).round().clamp(-128, 127) * act

            scalars = {"activation_scaling_factor": act}
            return Quantised(codes, codes.float() * scales.unsqueeze(1), scales, prequant, scalars, rounded)
        case "W8A16" | "W4A16":
            parts = [
                weight_only(part, 8 if algorithm == "W8A16" else 4, dtype) for part in weight.chunk(column_parts, 1)
            ]
            return Quantised(weight.to(dtype), torch.cat(parts, 1))
        case _:
            return Quantised(weight.to(dtype), weight.to(dtype).float())


def weight_only(weight: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The float32 values that TensorRT-LLM's loader makes of (..., out, in) weights in a model of `dtype`."""
    values = weight.to(dtype).double()
    scales = (values.abs().amax(-1, keepdim=True) / 2 ** (bits - 1)).float()
    exact = values.float() / scales
    codes = torch.where(exact < 0, -((-exact.double() + 0.5).floor()), (exact.double() + 0.5).floor())
    return codes.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).float() * scales.to(dtype).float()


def e4m3(values: Tensor) -> Tensor:
    """The nearest E4M3 numbers, saturating."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _by_token(x: Tensor) -> Tensor:
    """Each token in E4M3 of its largest number / 448."""
    scales = x.abs().amax(-1, keepdim=True) / 448
    return e4m3(x / scales) * scales


def _nvfp4(weight: Tensor) -> Quantised:
    """E2M1 with an E4M3 scale for each 16 inputs, and one for all."""
    second, act = torch.tensor([1.2 / (6 * 448)]), torch.tensor([6.0 / (6 * 448)])
    codes, scales = _in_blocks(weight / second)
    values = (_of_e2m1(codes) * scales.float().repeat_interleave(16, dim=-1)) * second

    def rounded(x: Tensor) -> Tensor:
        found, of_blocks = _in_blocks(x / act)
        return _of_e2m1(found) * of_blocks.float().repeat_interleave(16, dim=-1) * act

    scalars = {"weights_scaling_factor_2": second, "activation_scaling_factor": act}
    return Quantised(codes, values, scales, scalars=scalars, rounded=rounded, paired=True)


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # halves go to even codes: up from every second one


def _in_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 codes (..., size) in uint8 of values, and E4M3 scales (..., size / 16)."""
    blocks = values.unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    steps = scales.float().unsqueeze(-1)
    sizes = (blocks.abs() / steps.where(steps > 0, torch.ones_like(steps))).unsqueeze(-1)
    above = torch.where(torch.arange(7) % 2 == 1, sizes >= _BOUNDS, sizes > _BOUNDS).sum(-1)
    return (above + 8 * blocks.signbit()).flatten(-2).to(torch.uint8), scales


def _of_e2m1(codes: Tensor) -> Tensor:
    return _E2M1[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())


def _awq(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes in [-8, 7], scales of groups, and what inputs are multiplied with."""
    prequant = _prequant(weight, dtype)
    blocks = (weight / prequant.float()).unflatten(1, (-1, group))
    scales = blocks.abs().amax(2) / 7
    return (blocks / scales.unsqueeze(2)).round().clamp(-8, 7).to(torch.int8).flatten(1), scales, prequant


def _prequant(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.linspace(0.5, 2.0, weight.shape[1]).to(dtype)
