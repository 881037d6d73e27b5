"""Compensated rounding of the linears that read an input: which scale and which codes they get."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtforge.calibrate.awq import AwqChoice, quantization_error, sampled_rows, search
from trtforge.calibrate.compensation import Compensated, Factor, compensate
from trtforge.calibrate.statistics import InputStatistics
from trtforge.formats.calibration import LEAST_TOKENS
from trtforge.models.transforms import dequantize_int4, pack_int4

_JUDGED_ROWS = 128  # outputs on which scales, and the two ways of rounding, are compared
_MAX_ELEMENTS = 1 << 24  # weight elements rounded at once


@dataclass(frozen=True)
class Input:
    """An input and the linears that read it: their names within the layer, and their outputs.

    `weight` returns their matrices, one below the other, (sum of `outputs`, in) float32.
    """

    statistics: InputStatistics
    names: tuple[str, ...]
    outputs: tuple[int, ...]
    weight: Callable[[], Tensor]


@dataclass
class Rounded:
    """Results by name within the layer: `tensors` for the calibration's main file, and `codes` with their scales."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    codes: dict[str, Tensor] = field(default_factory=dict)


def round_linears(inputs: Sequence[Input], group_size: int) -> Rounded:
    """Round all linears of `inputs`, which share one pre-quantisation scale. Uses up the statistics.

    One input: AWQ's scale or none, whichever leaves the smaller error after compensation. Several (a layer's experts):
    the mean of their AWQ scales. Linears without codes in the result are to be rounded to the nearest: those of an
    input with fewer tokens than LEAST_TOKENS, and those that compensation does not improve.
    """
    choices = [_awq(each, group_size) for each in inputs]
    seen = [choice.pre_quant_scale for choice, own in zip(choices, inputs, strict=True) if own.statistics.tokens]
    shared = _in_every_dtype(torch.stack(seen or [choices[0].pre_quant_scale]).mean(dim=0))
    candidates = (shared,) if len(inputs) > 1 else (shared, torch.ones_like(shared))
    found = Rounded()
    for own, choice in zip(inputs, choices, strict=True):
        _round(own, choice, candidates, group_size, found)
    return found


def _awq(own: Input, group_size: int) -> AwqChoice:
    if own.statistics.tokens == 0:  # an expert that no token reached
        return AwqChoice(0.0, torch.ones_like(own.statistics.channel_amax), 0.0)
    return search(own.weight(), own.statistics, group_size)


def _in_every_dtype(scale: Tensor) -> Tensor:
    """The scale rounded to values that all dtypes of a checkpoint hold: the codes are right for each of them."""
    return scale.bfloat16().float()


def _round(own: Input, choice: AwqChoice, candidates: tuple[Tensor, ...], group_size: int, found: Rounded) -> None:
    statistics, weight = own.statistics, own.weight()
    parts = dict(zip(own.names, weight.split(own.outputs), strict=True))
    samples = {name: part[sampled_rows(len(part))] for name, part in parts.items()}
    energies = {name: float(statistics.output_errors(rows).sum()) for name, rows in samples.items()}
    plain = candidates[0]
    nearest = {name: _nearest_error(statistics, rows, plain, group_size) for name, rows in samples.items()}
    tokens = statistics.tokens
    factor = Factor.of(statistics.take_gram(), tokens) if tokens >= LEAST_TOKENS else None
    best = None if factor is None else _best_scale(weight, candidates, factor, group_size)
    scale = plain if best is None else best
    for name, part in parts.items():
        error = nearest[name]
        if best is not None and factor is not None:
            rounded = _compensated(part, best, factor, group_size)
            restored = dequantize_int4(rounded.codes, rounded.scales) * best
            error = _sampled_error(rounded.errors, restored - part, factor)
            found.codes[f"{name}.codes"], found.codes[f"{name}.scales"] = pack_int4(rounded.codes), rounded.scales
            found.tensors[f"{name}.weight_column_amax"] = restored.abs().amax(dim=0)
        energy = max(energies[name], torch.finfo(torch.float32).tiny)
        found.tensors |= {
            f"{name}.pre_quant_scale": scale.clone(),  # safetensors refuses tensors that share memory
            f"{name}.alpha": torch.tensor([choice.alpha if scale is plain else 0.0]),
            f"{name}.tokens": torch.tensor([float(tokens)]),
            f"{name}.output_error": torch.tensor([error / energy]),
            f"{name}.nearest_error": torch.tensor([nearest[name] / energy]),
        }


def _nearest_error(statistics: InputStatistics, rows: Tensor, scale: Tensor, group_size: int) -> float:
    difference = quantization_error(rows, (1 / scale).unsqueeze(0), group_size)[0]
    return float(statistics.output_errors(difference).sum())


def _sampled_error(errors: Tensor, difference: Tensor, factor: Factor) -> float:
    """The sum of `errors` (out,) over the sampled rows of a weight error, without the part of the damping."""
    rows = sampled_rows(len(errors))
    return max(0.0, float(errors[rows].sum() - factor.damping * difference[rows].square().sum()))


def _best_scale(weight: Tensor, candidates: tuple[Tensor, ...], factor: Factor, group_size: int) -> Tensor | None:
    """The scale with the smallest error after compensation; None if rounding to the nearest is as good."""
    sample = weight[sampled_rows(len(weight))[:_JUDGED_ROWS]]
    plain = quantization_error(sample, (1 / candidates[0]).unsqueeze(0), group_size)[0]
    least, best = float(factor.errors(plain).sum()), None
    for scale in candidates:
        error = float(compensate(sample, scale, factor, group_size).errors.sum())
        if error < least:
            least, best = error, scale
    return best


def _compensated(weight: Tensor, scale: Tensor, factor: Factor, group_size: int) -> Compensated:
    """`compensate`, some rows at a time to bound memory."""
    parts = [
        compensate(rows, scale, factor, group_size) for rows in weight.split(max(2, _MAX_ELEMENTS // weight.shape[1]))
    ]
    return Compensated(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.errors for part in parts]),
    )
