"""AWQ's search: the pre-quantisation scale of each linear that least disturbs its output, and how far to clip.

Activation-aware Weight Quantization (Lin et al., 2023) as in NVIDIA ModelOpt's awq_lite (0.47, model_calib.py):
s = mean|x|^α / w^(1-α), w = the mean over rows of |W| / its block's largest, α = 0, 0.1, ... 1. ModelOpt measures the
error with a second pass over the data for every α; here a sketch of the data, of fixed size, gives the same number.
"""

from collections.abc import Iterator
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
_ROWS, _PROBED_ROWS = 256, 48  # of a weight that are judged at once, and of the first of them
_WIDE = 1024  # inputs: judging takes long from there
_TOLERANCE, _TOLERANCE_OF_WIDE = 0.003, 0.01  # by which a better candidate may be missed
_SURE_OF_GUESSES, _SURE = 2.5, 3.0  # so many standard errors exclude one: guessed once, judged as often as it takes


@dataclass(frozen=True)
class AwqChoice:
    """The best scale found. `pre_quant_scale` (in,) multiplies inputs; `error` is relative to the output's energy, of
    at most 256 outputs."""

    alpha: float
    pre_quant_scale: Tensor
    error: float


def search(weight: Tensor, statistics: InputStatistics, group_size: int) -> AwqChoice:
    """The best α for a weight (out, in) of float32 with the statistics of its input.

    A race: output errors are first guessed, for some rows, as if the errors of a row's elements were independent, which
    takes no matrix product. Whoever may be the best by that is judged, on as many rows as it takes to tell.
    """
    importance = _relative_weight_magnitude(weight, group_size)
    scales = smoothing_scales(statistics.mean_magnitude, importance)
    tolerance = _TOLERANCE if weight.shape[1] < _WIDE else _TOLERANCE_OF_WIDE
    parts = _shuffled(len(weight)).split(_ROWS)
    some = weight[parts[0]]
    rivals = _rivals(some, len(weight), scales, statistics, group_size, tolerance)
    errors = torch.empty(len(rivals), 0, device=weight.device)
    for part in parts:
        differences = _differences(weight[part], scales[rivals], group_size)
        errors = torch.cat((errors, torch.cat([statistics.output_errors(each) for each in differences])), dim=1)
        best, others = _leaders(errors, len(weight), tolerance, _SURE)
        left = [best, *others]
        rivals, errors = [rivals[index] for index in left], errors[left]
        if not others:
            break
    energy = statistics.output_errors(some).sum().clamp(min=torch.finfo(torch.float32).tiny)
    return AwqChoice(ALPHAS[rivals[0]], 1.0 / scales[rivals[0]], float(errors[0, : len(some)].sum() / energy))


def _rivals(
    some: Tensor, rows: int, scales: Tensor, statistics: InputStatistics, group_size: int, tolerance: float
) -> list[int]:
    """Which scales may be the best, by guesses for some rows of a weight that has `rows`.

    The first rows' true errors tell how far guesses are off. What they leave out averages to nothing over rows, with a
    standard error that follows from its size, relative to a row's guess.
    """
    guesses, probes = [], []
    for differences in _differences(some, scales, group_size):
        probes.append(statistics.output_errors(differences[:, :_PROBED_ROWS]))
        guesses.append(statistics.independent_errors(differences))
    guessed, probed = torch.cat(guesses), torch.cat(probes)
    best = int(guessed.mean(dim=1).argmin())
    left_out = probed - guessed[:, : probed.shape[1]]
    relative = (left_out - left_out[best]) / guessed[best, : probed.shape[1]].clamp(min=torch.finfo(torch.float32).tiny)
    variance = relative.square().mean(dim=1) * guessed[best].square().mean() / rows
    leader, others = _leaders(guessed, rows, tolerance, _SURE_OF_GUESSES, variance)
    return sorted([leader, *others])


def _leaders(
    errors: Tensor, rows: int, tolerance: float, sure: float, variance: Tensor | float = 0.0
) -> tuple[int, list[int]]:
    """The best candidate by errors (candidates, some of `rows` outputs), and those that may yet be better.

    Better by a share of `tolerance`, unless `sure` standard errors exclude it. `variance` (candidates,): of each mean's
    difference from the best one's, beside that of the sample.
    """
    total = errors.mean(dim=1)
    best = int(total.argmin())
    seen = errors.shape[1]
    of_sample = (errors - errors[best]).var(dim=1) * (1 / seen - 1 / rows) if seen < rows else 0.0
    spread = torch.as_tensor(of_sample + variance, device=errors.device).sqrt()
    possible = total - total[best] - sure * spread < -tolerance * total[best]
    possible[best] = False
    return best, possible.nonzero().flatten().tolist()


def _differences(rows: Tensor, scales: Tensor, group_size: int) -> Iterator[Tensor]:
    """`quantization_error` of so many scales at once that memory is bounded."""
    for part in scales.split(max(1, _AT_ONCE // rows.numel())):
        yield quantization_error(rows, part, group_size)


def _shuffled(rows: int) -> Tensor:
    """(rows,) their numbers at random, but the same in every run."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(0))


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
