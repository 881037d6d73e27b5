"""Errors of each number format in a linear layer: the weights' output error from second moments, the inputs' rounding.

With inputs X and a weight error D, the squared output error is ‖X Dᵀ‖².
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.calibrate.statistics import InputStatistics
from trtforge.core.number_limits import E2M1_MAX, FP8_MAX, INT8_MAX, NVFP4_BLOCK
from trtforge.core.recipe import QuantFormat
from trtforge.formats.calibration import Calibration, RoundedWeight
from trtforge.formats.shards import RowReader, StoredTensor
from trtforge.models.transforms import (
    PRE_QUANT_SCALE_BOUNDS,
    TORCH,
    dequantize_int4,
    fp8_scale,
    int4_scales,
    int8_row_scales,
    nvfp4_block_scales,
    nvfp4_global_scale,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_nvfp4,
    unpack_int4,
)
from trtforge.runtime.linears.nvfp4_linear import from_e2m1, round_to_nvfp4


@dataclass(frozen=True)
class Modules:
    """Modules of linear layers: `joined` in one matrix with one AWQ scale; `together`: with one FP8 scale."""

    joined: Sequence[str]
    together: Sequence[str]


@dataclass(frozen=True)
class ObservedLinear:
    """A linear layer: its `weight` (out, in) float32 and the `statistics` of its input."""

    module: str
    weight: Tensor
    statistics: InputStatistics
    modules: Modules


def weight_errors(linear: ObservedLinear, quant: QuantFormat, calibration: Calibration) -> Tensor:
    """(out,) squared output errors of the format's weights, summed over the tokens of the statistics.

    `calibration`: for this format; for fp8, any. Raises ForgeError if it lacks data that the format needs.
    """
    restored, statistics = _restored(linear, quant, calibration), linear.statistics
    errors = statistics.output_errors(restored - linear.weight)
    if quant == "nvfp4" and statistics.noise is not None:  # input noise, which compensated weights reduce
        errors += (restored.square() - linear.weight.square()) @ statistics.noise
    return errors.clamp_(min=0.0)


def input_rounding(modules: Modules, quant: QuantFormat, calibration: Calibration) -> Callable[[Tensor], Tensor]:
    """A function that rounds inputs (tokens, in) float32 as the format does, with the calibration's scales."""
    bound, vector = {"fp8": FP8_MAX, "w4a8_awq": FP8_MAX, "int8_sq": INT8_MAX, "nvfp4": E2M1_MAX * FP8_MAX}, None
    if quant not in bound:  # weight-only formats do not round inputs
        return lambda inputs: inputs
    amax = torch.stack([calibration.input_amax(module) for module in modules.together]).amax()
    if quant in ("w4a8_awq", "int8_sq"):
        awq = quant == "w4a8_awq"
        vector = _awq(modules, calibration) if awq else _smoothquant(modules, calibration)
        amax = torch.stack([calibration.input_channel_amax(module) * vector for module in modules.joined]).amax()
    scale = torch.where(amax > 0, amax / bound[quant], torch.ones_like(amax))

    def rounded_inputs(inputs: Tensor) -> Tensor:
        scaled = inputs if vector is None else inputs * vector
        if quant == "nvfp4":
            rounded = round_to_nvfp4(scaled, scale) * scale
        elif quant == "int8_sq":
            rounded = (scaled / scale).round_().clamp_(-128, 127) * scale
        else:
            rounded = quantize_fp8(scaled, scale).float() * scale
        return rounded if vector is None else rounded / vector

    return rounded_inputs


def _restored(linear: ObservedLinear, quant: QuantFormat, calibration: Calibration) -> Tensor:
    """The dequantised weight."""
    weight = linear.weight
    match quant:
        case "fp8":
            scale = fp8_scale(_largest(linear.modules, calibration))
            return quantize_fp8(weight, scale).float() * scale
        case "int4_awq" | "w4a8_awq":
            return _restored_awq(linear, calibration)
        case "int8_sq":
            vector = _smoothquant(linear.modules, calibration)
            scales = int8_row_scales(weight / vector)
            return quantize_int8(weight / vector, scales).float() * scales.unsqueeze(1) * vector
        case "nvfp4":
            return _restored_nvfp4(linear, calibration)
        case _:
            raise AssertionError(f"{quant} has no calibration")


def _restored_nvfp4(linear: ObservedLinear, calibration: Calibration) -> Tensor:
    overall = nvfp4_global_scale(_largest(linear.modules, calibration))
    rounded = calibration.rounded.get(linear.module)
    if rounded is not None:
        codes, blocks = _whole(rounded.codes), _whole(rounded.scales)
    else:
        blocks = nvfp4_block_scales(linear.weight, overall)
        codes = quantize_nvfp4(linear.weight, blocks, overall)
    values = from_e2m1(codes).unflatten(1, (-1, NVFP4_BLOCK))
    restored: Tensor = (values * (blocks.float() * overall).unsqueeze(2)).flatten(1)
    return restored


def _restored_awq(linear: ObservedLinear, calibration: Calibration) -> Tensor:
    rounded = calibration.rounded.get(linear.module)
    if rounded is not None:
        return _of_codes(rounded) * calibration.pre_quant_scale(linear.module)
    vector = _awq(linear.modules, calibration)
    scaled = linear.weight / vector
    scales = int4_scales(scaled, calibration.group_size)
    return dequantize_int4(quantize_int4(scaled, scales), scales) * vector


def _of_codes(rounded: RoundedWeight) -> Tensor:
    return dequantize_int4(unpack_int4(_whole(rounded.codes)), _whole(rounded.scales))


def _whole(stored: StoredTensor) -> Tensor:
    data = bytearray(stored.spec.nbytes)
    with RowReader() as reader:
        reader.read(stored, 0, stored.spec.shape[0], memoryview(data))
    return torch.frombuffer(data, dtype=TORCH[stored.spec.dtype.name]).view(stored.spec.shape)


def _largest(modules: Modules, calibration: Calibration) -> Tensor:
    return torch.stack([calibration.weight_amax(module) for module in modules.together]).amax()


def _awq(modules: Modules, calibration: Calibration) -> Tensor:
    return torch.stack([calibration.pre_quant_scale(module) for module in modules.joined]).mean(dim=0)


def _smoothquant(modules: Modules, calibration: Calibration) -> Tensor:
    amax = torch.stack([calibration.input_channel_amax(module) for module in modules.joined]).amax(dim=0)
    return torch.where(amax > 0, (1.0 / amax).clamp(*PRE_QUANT_SCALE_BOUNDS), torch.ones_like(amax))
