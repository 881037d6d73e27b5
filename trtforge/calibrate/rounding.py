"""Compensated rounding of the linears that read an input: their codes and scales."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtforge.calibrate.awq import AwqChoice, sampled_rows, search
from trtforge.calibrate.compensation import Compensated, Factor, compensate
from trtforge.calibrate.grids import Grid
from trtforge.calibrate.statistics import InputStatistics
from trtforge.formats.calibration import LEAST_TOKENS

_REPORTED_ROWS = 64  # outputs of each linear whose errors are reported and decide how it is rounded
_MAX_ELEMENTS = 1 << 24  # weight elements rounded at once


@dataclass(frozen=True)
class Input:
    """An input and the linears that read it: their names within the layer and their numbers of outputs.

    `weight` returns their concatenated matrices, (sum of `outputs`, in) float32; `grid`: of all outputs.
    """

    statistics: InputStatistics
    names: tuple[str, ...]
    outputs: tuple[int, ...]
    weight: Callable[[], Tensor]
    grid: Grid


@dataclass
class Rounded:
    """Results by name within the layer: `tensors` for the calibration's main file, and `codes` with their scales."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    codes: dict[str, Tensor] = field(default_factory=dict)


def round_linears(inputs: Sequence[Input], *, smoothed: bool = True, columns: bool = False) -> Rounded:
    """Round all linears of `inputs`, which share one pre-quantisation scale if `smoothed`. Consumes the statistics.

    That scale is 1, unless several inputs share it (a layer's experts) or the input has fewer tokens than LEAST_TOKENS:
    then it is the mean of the scales that AWQ finds. Linears without codes in the result must be rounded to the
    nearest: those of an input with fewer tokens than LEAST_TOKENS, and those that compensation does not improve.
    `columns`: also return the largest magnitude in each column of the dequantised codes.
    """
    found = Rounded()
    choice = AwqChoice(0.0, torch.ones_like(inputs[0].statistics.channel_amax), 0.0)
    if smoothed and (len(inputs) > 1 or inputs[0].statistics.tokens < LEAST_TOKENS):
        choice = _mean_of_awq(inputs)
    for own in inputs:
        _Linears(own, choice).round(found, smoothed=smoothed, columns=columns)
    return found


def _mean_of_awq(inputs: Sequence[Input]) -> AwqChoice:
    """The mean of the scales that AWQ finds for each input that has tokens, and of the exponents."""
    seen = [own for own in inputs if own.statistics.tokens]
    if not seen:
        return AwqChoice(0.0, torch.ones_like(inputs[0].statistics.channel_amax), 0.0)
    found = [search(own.weight(), own.statistics, own.grid.group) for own in seen]
    scale = torch.stack([choice.pre_quant_scale for choice in found]).mean(dim=0)
    alpha = sum(choice.alpha for choice in found) / len(found)
    return AwqChoice(alpha, _in_every_dtype(scale), 0.0)


def _in_every_dtype(scale: Tensor) -> Tensor:
    """The scale rounded to values of all dtypes of a checkpoint, so that the codes are valid for each dtype."""
    return scale.bfloat16().float()


class _Linears:
    """The linears of an input, with the pre-quantisation scale of `choice`.

    `_target` is rounded with compensation: the weight itself, unless inputs are rounded too.
    """

    def __init__(self, own: Input, choice: AwqChoice) -> None:
        self._own, self._choice = own, choice
        self._weight = self._target = own.weight()
        starts = [sum(own.outputs[:index]) for index in range(len(own.outputs))]
        samples = [
            first + sampled_rows(outputs)[:_REPORTED_ROWS] for first, outputs in zip(starts, own.outputs, strict=True)
        ]
        self._samples, self._sampled = torch.cat(samples), [len(each) for each in samples]

    def round(self, found: Rounded, *, smoothed: bool, columns: bool) -> None:
        """Add the results to `found`."""
        statistics, tokens = self._own.statistics, self._own.statistics.tokens
        if tokens < LEAST_TOKENS:
            self._report(statistics.output_errors, found, smoothed)
            return
        factor = Factor.of(statistics.take_gram(), tokens)
        if factor is None:  # inputs that were always zero: no rounding has an error
            self._report(lambda difference: difference.new_zeros(len(difference)), found, smoothed)
            return
        if statistics.cross is not None:
            self._target = factor.adapted(self._weight, statistics.take_cross())
        energies, nearest = self._report(factor.undamped_errors, found, smoothed)
        scale = self._choice.pre_quant_scale
        fitted = self._own.grid.fitted(self._target, factor.weights)
        rounded = _compensated(self._target, scale, factor, fitted)
        difference = rounded.of_rows(self._samples).values * scale - self._target[self._samples]
        errors = self._by_name(factor.undamped_errors(difference))
        if sum(errors.values()) >= sum(nearest.values()):
            return
        outputs = torch.arange(len(self._weight), device=self._weight.device).split(self._own.outputs)
        for name, rows in zip(self._own.names, outputs, strict=True):
            grid, mine = self._own.grid.of_rows(rows), rounded.of_rows(rows)
            found.codes[f"{name}.codes"], found.codes[f"{name}.scales"] = grid.stored(mine.levels, mine.steps)
            found.tensors[f"{name}.output_error"] = torch.tensor([errors[name] / energies[name]])
            if columns:
                found.tensors[f"{name}.weight_column_amax"] = (mine.values * scale).abs_().amax(dim=0)

    def _report(
        self, errors_of: Callable[[Tensor], Tensor], found: Rounded, smoothed: bool
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Add the errors of rounding to the nearest to `found`; returns the outputs' energies and errors.

        `errors_of`: the output errors (rows,) of a weight error (rows, in).
        """
        energies = self._by_name(errors_of(self._target[self._samples]))
        energies = {name: max(energy, torch.finfo(torch.float32).tiny) for name, energy in energies.items()}
        errors = self._by_name(errors_of(self._nearest_difference()))
        for name in self._own.names:
            left = torch.tensor([errors[name] / energies[name]])
            found.tensors |= {
                f"{name}.tokens": torch.tensor([float(self._own.statistics.tokens)]),
                f"{name}.inputs": torch.tensor([float(self._weight.shape[1])]),
                f"{name}.output_error": left.clone(),
                f"{name}.nearest_error": left,
            }
            if smoothed:
                found.tensors[f"{name}.alpha"] = torch.tensor([self._choice.alpha])
                found.tensors[f"{name}.pre_quant_scale"] = self._choice.pre_quant_scale.clone()  # not shared in memory
        return energies, errors

    def _by_name(self, errors: Tensor) -> dict[str, float]:
        """The sums of the errors of the reported outputs; at least 0, also after the damping's part is subtracted."""
        parts = errors.split(self._sampled)
        return {name: max(0.0, float(part.sum())) for name, part in zip(self._own.names, parts, strict=True)}

    def _nearest_difference(self) -> Tensor:
        """The weight error (rows, in) of rounding the reported outputs to the nearest."""
        scale, rows = self._choice.pre_quant_scale, self._samples
        nearest = self._own.grid.of_rows(rows).nearest(self._weight[rows] / scale) * scale
        return nearest.sub_(self._target[rows])


def _compensated(weight: Tensor, scale: Tensor, factor: Factor, grid: Grid) -> Compensated:
    """`compensate`, some rows at a time to bound memory."""
    each = max(2, _MAX_ELEMENTS // weight.shape[1])
    slices = [slice(first, first + each) for first in range(0, len(weight), each)]
    parts = [compensate(weight[rows], scale, factor, grid.of_rows(rows)) for rows in slices]
    return Compensated(
        torch.cat([part.levels for part in parts]),
        torch.cat([part.steps for part in parts]),
        grid.unit,
    )
