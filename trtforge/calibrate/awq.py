"""AWQ search: the pre-quantisation scale that minimises a linear's output error, and the clip ratio of each block.

Activation-aware Weight Quantization (Lin et al., 2023) as in NVIDIA ModelOpt's awq_lite (0.47, model_calib.py):
s = mean|x|^α / w^(1-α), w = the mean over rows of |W| / its block's amax, α = 0, 0.1, ... 1. ModelOpt measures the
error with a second pass over the data for every α; here a fixed-size sketch of the data estimates it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.calibrate.statistics import InputStatistics
from trtforge.models.transforms import INT4_MAX, PRE_QUANT_SCALE_BOUNDS

ALPHAS = tuple(step / 10 for step in range(11))
CLIP_RATIOS = (*(round(0.5 + 0.05 * step, 2) for step in range(10)), 1.0)
_MAX_ELEMENTS = 1 << 22  # weight elements times candidates, evaluated at once
_CLIP_ROWS = 1024  # output rows whose blocks are clipped at once
_ROWS, _PROBED_ROWS = 256, 48  # output rows evaluated at once; number of the first rows with exact errors
_WIDE = 1024  # input features from which evaluation is slow and the second tolerance applies
_TOLERANCE, _TOLERANCE_OF_WIDE = 0.003, 0.01  # relative error by which the chosen candidate may be worse than the best
_Z_ESTIMATED, _Z_EXACT = 2.5, 3.0  # z-thresholds for dropping a candidate: estimate phase, exact phase


@dataclass(frozen=True)
class AwqChoice:
    """The best scale found. `pre_quant_scale` (in,) multiplies inputs; `error`: squared output error / squared output
    norm, over at most 256 outputs."""

    alpha: float
    pre_quant_scale: Tensor
    error: float


def search(weight: Tensor, statistics: InputStatistics, group_size: int) -> AwqChoice:
    """The best α for a float32 weight (out, in), given the statistics of its input.

    Phase 1 estimates the output errors of some rows as if the errors of a row's elements were independent, which takes
    no matrix product. Phase 2 computes exact errors of the remaining candidates, on more rows until one is best.
    """
    importance = _relative_weight_magnitude(weight, group_size)
    scales = smoothing_scales(statistics.mean_magnitude, importance)
    tolerance = _TOLERANCE if weight.shape[1] < _WIDE else _TOLERANCE_OF_WIDE
    parts = _shuffled(len(weight)).split(_ROWS)
    sample = weight[parts[0]]
    candidates = _candidates(sample, len(weight), scales, statistics, group_size, tolerance)
    errors = torch.empty(len(candidates), 0, device=weight.device)
    for part in parts:
        differences = _differences(weight[part], scales[candidates], group_size)
        errors = torch.cat((errors, torch.cat([statistics.output_errors(each) for each in differences])), dim=1)
        best, others = _leaders(errors, len(weight), tolerance, _Z_EXACT)
        kept = [best, *others]
        candidates, errors = [candidates[index] for index in kept], errors[kept]
        if not others:
            break
    energy = statistics.output_errors(sample).sum().clamp(min=torch.finfo(torch.float32).tiny)
    chosen = candidates[0]
    return AwqChoice(ALPHAS[chosen], 1.0 / scales[chosen], float(errors[0, : len(sample)].sum() / energy))


def _candidates(
    sample: Tensor, rows: int, scales: Tensor, statistics: InputStatistics, group_size: int, tolerance: float
) -> list[int]:
    """Indices of the scales that may be best, by estimates on the rows `sample` of a weight with `rows` rows.

    The exact errors of the first rows show the deviations of the estimates. These average out over rows; their standard
    error follows from their size relative to a row's estimate.
    """
    estimates, probes = [], []
    for differences in _differences(sample, scales, group_size):
        probes.append(statistics.output_errors(differences[:, :_PROBED_ROWS]))
        estimates.append(statistics.independent_errors(differences))
    estimated, exact = torch.cat(estimates), torch.cat(probes)
    best = int(estimated.mean(dim=1).argmin())
    probed = estimated[:, : exact.shape[1]]
    deviation = exact - probed
    relative = (deviation - deviation[best]) / probed[best].clamp(min=torch.finfo(torch.float32).tiny)
    variance = relative.square().mean(dim=1) * estimated[best].square().mean() / rows
    leader, others = _leaders(estimated, rows, tolerance, _Z_ESTIMATED, variance)
    return sorted([leader, *others])


def _leaders(
    errors: Tensor, rows: int, tolerance: float, z: float, variance: Tensor | float = 0.0
) -> tuple[int, list[int]]:
    """The best candidate by `errors` (candidates, sampled outputs of `rows`), and those that may still be better.

    A candidate is better if its error is lower by a share of at least `tolerance`; `z` standard errors exclude it.
    `variance` (candidates,) of each mean's difference from the best one's, in addition to the sampling variance.
    """
    total = errors.mean(dim=1)
    best = int(total.argmin())
    seen = errors.shape[1]
    sampling = (errors - errors[best]).var(dim=1) * (1 / seen - 1 / rows) if seen < rows else 0.0
    standard_error = torch.as_tensor(sampling + variance, device=errors.device).sqrt()
    possible = total - total[best] - z * standard_error < -tolerance * total[best]
    possible[best] = False
    return best, possible.nonzero().flatten().tolist()


def _differences(rows: Tensor, scales: Tensor, group_size: int) -> Iterator[Tensor]:
    """`quantization_error` for batches of scales, to bound memory."""
    for part in scales.split(max(1, _MAX_ELEMENTS // rows.numel())):
        yield quantization_error(rows, part, group_size)


def sampled_rows(rows: int) -> Tensor:
    """The rows, at most 256, of a weight with `rows` rows whose errors are reported."""
    return _shuffled(rows)[:_ROWS]


def _shuffled(rows: int) -> Tensor:
    """(rows,) the row indices in a random order that is the same in every run."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(0))


def quantization_error(weight: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """(scales, out, in) the INT4 block quantisation error of `weight`, its columns multiplied by each scale (in,)."""
    error = weight * scales.unsqueeze(1)
    blocks = error.unflatten(2, (-1, group_size))
    # not torch.aminmax, which takes ten times as long on a CPU
    largest = torch.maximum(blocks.amax(dim=3, keepdim=True), blocks.amin(dim=3, keepdim=True).neg_())
    steps = largest.div_(INT4_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    blocks.div_(steps).round_().mul_(steps)  # the step keeps them within -7 and 7
    return error.div_(scales.unsqueeze(1)).sub_(weight)


def smoothing_scales(mean_magnitude: Tensor, importance: Tensor) -> Tensor:
    """(alphas, in) factors for the weight's columns, normalised so that max * min of each row is 1."""
    alphas = torch.tensor(ALPHAS, device=importance.device).unsqueeze(1)
    tiny = torch.finfo(torch.float32).tiny
    scales = (mean_magnitude.pow(alphas) / (importance.pow(1 - alphas) + tiny)).clamp(*PRE_QUANT_SCALE_BOUNDS)
    return scales / (scales.amax(dim=1, keepdim=True) * scales.amin(dim=1, keepdim=True)).sqrt()


def clip_ratios(weight: Tensor, pre_quant_scale: Tensor, sketch: Tensor, group_size: int) -> Tensor:
    """(out, in / group) float32: the best clip threshold of each block, as a share of its amax.

    Minimises each block's output error on its part of the scaled input (ModelOpt's awq_clip uses 64 tokens per batch).
    """
    blocks = (weight / pre_quant_scale).unflatten(1, (-1, group_size))
    scaled = (sketch * pre_quant_scale).unflatten(1, (-1, group_size)).transpose(0, 1)
    own = scaled.transpose(1, 2) @ scaled  # (blocks, group, group) Gram matrices
    amax = blocks.abs().amax(dim=2, keepdim=True)
    best = torch.full(blocks.shape[:2], torch.inf, device=weight.device)
    chosen = torch.ones_like(best)
    for first in range(0, len(blocks), _CLIP_ROWS):
        part, part_amax = blocks[first : first + _CLIP_ROWS], amax[first : first + _CLIP_ROWS]
        for ratio in reversed(CLIP_RATIOS):  # 1.0 first: no clipping on a tie
            step = (part_amax * ratio / INT4_MAX).clamp(min=torch.finfo(torch.float32).tiny)
            error = (part / step).round_().clamp_(-8, 7).mul_(step).sub_(part)
            loss = (torch.bmm(error.transpose(0, 1), own).transpose(0, 1) * error).sum(dim=2)
            better = loss < best[first : first + _CLIP_ROWS]
            best[first : first + _CLIP_ROWS] = torch.where(better, loss, best[first : first + _CLIP_ROWS])
            chosen[first : first + _CLIP_ROWS].masked_fill_(better, ratio)
    return chosen


def _relative_weight_magnitude(weight: Tensor, group_size: int) -> Tensor:
    """(in,) mean over rows of |W| / the amax of its block."""
    blocks = weight.abs().unflatten(1, (-1, group_size))
    largest = blocks.amax(dim=2, keepdim=True) + torch.finfo(torch.float32).tiny
    relative: Tensor = (blocks / largest).flatten(1)
    return relative.mean(dim=0)
