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

    scales: (out,), or (out, in / group). scalars: tensors (1,) by name. values: float32 weights that are meant, for
    what `rounded` makes of the layer's inputs.
    """

    codes: Tensor
    values: Tensor
    scales: Tensor | None = None
    prequant: Tensor | None = None
    scalars: Mapping[str, Tensor] = field(default_factory=dict)
    rounded: Callable[[Tensor], Tensor] = lambda x: x
    packed: bool = False

    def part(self, rows: Tensor, columns: slice) -> dict[str, Tensor]:
        """The tensors of a rank, by what follows the module's name."""
        codes = self.codes[rows][:, columns]
        stored = {"weight": (codes[0::2] & 15) | (codes[1::2] << 4) if self.packed else codes, **self.scalars}
        if self.scales is not None:
            scales = self.scales[rows]
            if scales.dim() == 2:
                group = self.codes.shape[1] // scales.shape[1]
                scales = scales[:, columns.start // group : columns.stop // group]
            stored["weights_scaling_factor"] = scales
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


def _awq(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes in [-8, 7], scales of groups, and what inputs are multiplied with."""
    prequant = _prequant(weight, dtype)
    blocks = (weight / prequant.float()).unflatten(1, (-1, group))
    scales = blocks.abs().amax(2) / 7
    return (blocks / scales.unsqueeze(2)).round().clamp(-8, 7).to(torch.int8).flatten(1), scales, prequant


def _prequant(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.linspace(0.5, 2.0, weight.shape[1]).to(dtype)
