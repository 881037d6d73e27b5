"""AWQ's search: the pre-quantisation scale of each linear that least disturbs its output, and how far to clip.

Activation-aware Weight Quantization (Lin et al., 2023) as in NVIDIA ModelOpt's awq_lite (0.47, model_calib.py):
s = mean|x|^α / w^(1-α), w = the mean over rows of |W| / its block's largest, α = 0, 0.1, ... 1. ModelOpt measures the
error with a second pass over the data for every α; here the Gram matrix gives the same number without the data.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.calibrate.statistics import SKETCHED, InputStatistics, estimated_error, output_error
from trtforge.models.transforms import INT4_MAX

ALPHAS = tuple(step / 10 for step in range(11))
CLIP_RATIOS = (*(round(0.5 + 0.05 * step, 2) for step in range(10)), 1.0)
_LIMITS = (1e-4, 1e4)
_CACHED = 1 << 18  # float32 elements that a core's cache holds
_CLIP_ROWS = 1024  # outputs whose blocks are judged at once
_SCREENED_INPUTS = 4 * SKETCHED  # from here on the sketch saves most of the work
_SCREENED_ROWS = 512  # of a weight are enough to compare exponents
_FINALISTS, _MARGIN = 2, 1.03  # of the estimates, the best ones and not farther than this from the first are judged


@dataclass(frozen=True)
class AwqChoice:
    """The best scale found. `pre_quant_scale` (in,) multiplies inputs; `error` is relative to the output's energy."""

    alpha: float
    pre_quant_scale: Tensor
    error: float


def search(weight: Tensor, statistics: InputStatistics, group_size: int) -> AwqChoice:
    """The best α for a weight (out, in) of float32 with the statistics of its input.

    Where that saves work, some of the weight's rows against the sketch tell which α can be the best, and only those
    are judged exactly; the output's energy is the sketch's estimate then (a few per cent off).
    """
    assert statistics.gram is not None, "AWQ needs the Gram matrix"
    assert statistics.sketch is not None
    importance = _relative_weight_magnitude(weight, group_size)
    scales = [smoothing_scale(statistics.mean_magnitude, importance, alpha) for alpha in ALPHAS]
    if weight.shape[1] < _SCREENED_INPUTS:
        candidates: Sequence[int] = range(len(scales))
        energy = output_error(weight, statistics.gram)
    else:
        candidates = _finalists(weight, scales, statistics.sketch, group_size)
        energy = estimated_error(weight, statistics.sketch)
    work = torch.empty_like(weight)
    errors = {
        index: float(output_error(quantization_error(weight, scales[index], group_size, work), statistics.gram))
        for index in candidates
    }
    best = min(errors, key=errors.__getitem__)
    relative = errors[best] / max(float(energy), torch.finfo(torch.float32).tiny)
    return AwqChoice(ALPHAS[best], 1.0 / scales[best], relative)


def _finalists(weight: Tensor, scales: list[Tensor], sketch: Tensor, group_size: int) -> Sequence[int]:
    """The exponents, by number, that may be the best."""
    rows = weight[:: max(1, len(weight) // _SCREENED_ROWS)].contiguous()
    work = torch.empty_like(rows)
    estimates = [float(estimated_error(quantization_error(rows, scale, group_size, work), sketch)) for scale in scales]
    first, *others = sorted(range(len(scales)), key=estimates.__getitem__)[:_FINALISTS]
    return [first, *(index for index in others if estimates[index] <= _MARGIN * estimates[first])]


def quantization_error(weight: Tensor, scale: Tensor, group_size: int, work: Tensor) -> Tensor:
    """(out, in) what INT4 in blocks changes of `weight` when its columns are multiplied by `scale`; lives in `work`.

    A few rows at a time, so that every pass but the first finds them in the processor's cache.
    """
    inverse, rows = 1.0 / scale, max(1, _CACHED // weight.shape[1])
    for first in range(0, len(weight), rows):
        original, part = weight[first : first + rows], work[first : first + rows]
        torch.mul(original, scale, out=part)
        blocks = part.unflatten(1, (-1, group_size))
        smallest, largest = torch.aminmax(blocks, dim=2, keepdim=True)
        steps = torch.maximum(largest, smallest.neg_()).div_(INT4_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
        blocks.div_(steps).round_().mul_(steps)  # within -7 and 7 by the choice of the step
        part.mul_(inverse).sub_(original)
    return work


def smoothing_scale(mean_magnitude: Tensor, importance: Tensor, alpha: float) -> Tensor:
    """(in,) factor on the weight's columns: balanced so that the largest times the smallest is 1."""
    tiny = torch.finfo(torch.float32).tiny
    scale = (mean_magnitude.pow(alpha) / (importance.pow(1 - alpha) + tiny)).clamp(*_LIMITS)
    return scale / (scale.max() * scale.min()).sqrt()


def clip_ratios(weight: Tensor, pre_quant_scale: Tensor, gram: Tensor, group_size: int) -> Tensor:
    """(out, in / group) float32: the share of a block's largest magnitude at which it is best clipped.

    A block's error is judged alone, by its own part of the Gram matrix of the scaled input (awq_clip of ModelOpt
    judges it by 64 tokens a batch).
    """
    blocks = (weight / pre_quant_scale).unflatten(1, (-1, group_size))
    scaled = gram * pre_quant_scale.unsqueeze(0) * pre_quant_scale.unsqueeze(1)
    count = blocks.shape[1]
    own = torch.stack([scaled[i * group_size :, i * group_size :][:group_size, :group_size] for i in range(count)])
    amax = blocks.abs().amax(dim=2, keepdim=True)
    best = torch.full(blocks.shape[:2], torch.inf, device=weight.device)
    chosen = torch.ones_like(best)
    for first in range(0, len(blocks), _CLIP_ROWS):
        part, part_amax = blocks[first : first + _CLIP_ROWS], amax[first : first + _CLIP_ROWS]
        for ratio in CLIP_RATIOS:
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
