"""AWQ's search: the pre-quantisation scale of each linear that least disturbs its output, and how far to clip.

Activation-aware Weight Quantization (Lin et al., 2023) as in NVIDIA ModelOpt's awq_lite (0.47, model_calib.py):
s = mean|x|^α / w^(1-α), w = the mean over rows of |W| / its block's largest, α = 0, 0.1, ... 1. ModelOpt measures the
error with a second pass over the data for every α; here a sketch of the data, of fixed size, gives the same number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.calibrate.statistics import InputStatistics
from trtforge.models.transforms import INT4_MAX

ALPHAS = tuple(step / 10 for step in range(11))
CLIP_RATIOS = (*(round(0.5 + 0.05 * step, 2) for step in range(10)), 1.0)
_LIMITS = (1e-4, 1e4)
_AT_ONCE = 1 << 22  # elements of a weight, times candidates
_CLIP_ROWS = 1024  # outputs whose blocks are judged at once
_GUESSED_INPUTS = 1024  # linears this wide are guessed first
_GUESSED_ROWS, _PROBED_ROWS = 256, 48  # of a weight
_SURE, _TOLERANCE = 2.0, 0.01  # so many standard errors exclude that a candidate is better by this share


@dataclass(frozen=True)
class AwqChoice:
    """The best scale found. `pre_quant_scale` (in,) multiplies inputs; `error` is relative to the output's energy, of
    some rows of a wide weight."""

    alpha: float
    pre_quant_scale: Tensor
    error: float


def search(weight: Tensor, statistics: InputStatistics, group_size: int) -> AwqChoice:
    """The best α for a weight (out, in) of float32 with the statistics of its input.

    Where that saves much, output errors are guessed first, for some rows, as if the errors of a row's elements were
    independent, which takes no matrix product. Whoever may be the best by that is judged.
    """
    importance = _relative_weight_magnitude(weight, group_size)
    scales = smoothing_scales(statistics.mean_magnitude, importance)
    some = weight[_sample(len(weight), _GUESSED_ROWS)]
    wide = weight.shape[1] >= _GUESSED_INPUTS
    rivals = _rivals(some, len(weight), scales, statistics, group_size) if wide else list(range(len(scales)))
    best = rivals[0] if len(rivals) == 1 else _best(weight, rivals, scales, statistics, group_size)
    shown = some if wide else weight
    error = statistics.output_errors(quantization_error(shown, scales[[best]], group_size)).sum()
    energy = statistics.output_errors(shown).sum().clamp(min=torch.finfo(torch.float32).tiny)
    return AwqChoice(ALPHAS[best], 1.0 / scales[best], float(error / energy))


def _best(weight: Tensor, rivals: list[int], scales: Tensor, statistics: InputStatistics, group_size: int) -> int:
    """Of the scales at `rivals` the one with the least output error."""
    errors = torch.zeros(len(rivals), device=weight.device)
    for rows in weight.split(max(1, _AT_ONCE // (weight.shape[1] * len(rivals)))):
        errors += statistics.output_errors(quantization_error(rows, scales[rivals], group_size)).sum(dim=1)
    return rivals[int(errors.argmin())]


def _rivals(some: Tensor, rows: int, scales: Tensor, statistics: InputStatistics, group_size: int) -> list[int]:
    """Which scales may be the best, by some rows of a weight that has `rows`."""
    guesses, probes = [], []
    for part in scales.split(max(1, _AT_ONCE // some.numel())):
        differences = quantization_error(some, part, group_size)
        probes.append(statistics.output_errors(differences[:, :_PROBED_ROWS]))
        guesses.append(statistics.independent_errors(differences))
    return _may_be_best(torch.cat(guesses), torch.cat(probes), rows)


def _may_be_best(guesses: Tensor, probes: Tensor, rows: int) -> list[int]:
    """Candidates that cannot be excluded by guesses (candidates, some of `rows`) of each row's output error.

    `probes` (candidates, fewer rows), the first rows' true errors, tell how far guesses are off. What they leave out
    averages to nothing over rows, with a standard error that follows from its size, relative to a row's guess.
    """
    total = guesses.mean(dim=1)
    best = int(total.argmin())
    own, seen, probed = guesses[best], guesses.shape[1], probes.shape[1]
    left_out = probes - guesses[:, :probed]
    relative = (left_out - left_out[best]) / own[:probed].clamp(min=torch.finfo(torch.float32).tiny)
    of_guesses = relative.square().mean(dim=1) * own.square().mean() / rows
    of_sample = (guesses - own).var(dim=1) * (1 / seen - 1 / rows)
    cannot = total - total[best] - _SURE * (of_guesses + of_sample).sqrt() >= -_TOLERANCE * total[best]
    cannot[best] = False
    return (~cannot).nonzero().flatten().tolist()


def _sample(rows: int, count: int) -> Tensor:
    """Numbers of `count` rows, at random but the same in every run."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:count]


def quantization_error(weight: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """(scales, out, in) what INT4 in blocks changes of `weight` when its columns are multiplied by a scale (in,)."""
    error = weight * scales.unsqueeze(1)
    blocks = error.unflatten(2, (-1, group_size))
    # not torch.aminmax, which takes ten times as long on a CPU
    largest = torch.maximum(blocks.amax(dim=3, keepdim=True), blocks.amin(dim=3, keepdim=True).neg_())
    steps = largest.div_(INT4_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    blocks.div_(steps).round_().mul_(steps)  # within -7 and 7 by the choice of the step
    return error.div_(scales.unsqueeze(1)).sub_(weight)


def smoothing_scales(mean_magnitude: Tensor, importance: Tensor) -> Tensor:
    """(ALPHAS, in) factors on the weight's columns: balanced so that the largest times the smallest of each is 1."""
    alphas = torch.tensor(ALPHAS, device=importance.device).unsqueeze(1)
    tiny = torch.finfo(torch.float32).tiny
    scales = (mean_magnitude.pow(alphas) / (importance.pow(1 - alphas) + tiny)).clamp(*_LIMITS)
    return scales / (scales.amax(dim=1, keepdim=True) * scales.amin(dim=1, keepdim=True)).sqrt()


def clip_ratios(weight: Tensor, pre_quant_scale: Tensor, sketch: Tensor, group_size: int) -> Tensor:
    """(out, in / group) float32: the share of a block's largest magnitude at which it is best clipped.

    A block's error is judged alone, by its own part of the scaled input (awq_clip of ModelOpt judges it by 64 tokens a
    batch).
    """
    blocks = (weight / pre_quant_scale).unflatten(1, (-1, group_size))
    scaled = (sketch * pre_quant_scale).unflatten(1, (-1, group_size)).transpose(0, 1)
    own = scaled.transpose(1, 2) @ scaled  # (blocks, group, group) Gram matrices
    amax = blocks.abs().amax(dim=2, keepdim=True)
    best = torch.full(blocks.shape[:2], torch.inf, device=weight.device)
    chosen = torch.ones_like(best)
    for first in range(0, len(blocks), _CLIP_ROWS):
        part, part_amax = blocks[first : first + _CLIP_ROWS], amax[first : first + _CLIP_ROWS]
        for ratio in reversed(CLIP_RATIOS):  # where all are as good, nothing is clipped
            step = (part_amax * ratio / INT4_MAX).clamp(min=torch.finfo(torch.float32).tiny)
            error = (part / step).round_().clamp_(-8, 7).mul_(step).sub_(part)
            loss = (torch.bmm(error.transpose(0, 1), own).transpose(0, 1) * error).sum(dim=2)
            better = loss < best[first : first + _CLIP_ROWS]
            best[first : first + _CLIP_ROWS] = torch.where(better, loss, best[first : first + _CLIP_ROWS])
            chosen[first : first + _CLIP_ROWS].masked_fill_(better, ratio)
    return chosen


def _relative_weight_magnitude(weight: Tensor, group_size: int) -> Tensor:
    """(in,) mean over rows of |W| / the largest magnitude of its block."""
    blocks = weight.abs().unflatten(1, (-1, group_size))
    largest = blocks.amax(dim=2, keepdim=True) + torch.finfo(torch.float32).tiny
    relative: Tensor = (blocks / largest).flatten(1)
    return relative.mean(dim=0)
