"""INT4-AWQ's search: the pre-quantisation scale of each linear that least disturbs its output.

Activation-aware Weight Quantization (Lin et al., 2023) as in NVIDIA ModelOpt's awq_lite (0.37, model_calib.py):
s = mean|x|^α / w^(1-α), w = the mean over rows of |W| / its block's largest, α = 0, 0.1, ... 1. ModelOpt measures the
error with a second pass over the data for every α; here the Gram matrix gives the same number without the data.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.calibrate.statistics import InputStatistics, output_error
from trtforge.models.transforms import dequantize_int4, int4_scales, quantize_int4

ALPHAS = tuple(step / 10 for step in range(11))
_LIMITS = (1e-4, 1e4)


@dataclass(frozen=True)
class AwqChoice:
    """The best scale found. `pre_quant_scale` (in,) multiplies inputs; `error` is relative to the output's energy."""

    alpha: float
    pre_quant_scale: Tensor
    error: float


def search(weight: Tensor, statistics: InputStatistics, group_size: int) -> AwqChoice:
    """Try every α on a weight (out, in) of float32 with the statistics of its input."""
    assert statistics.gram is not None, "AWQ needs the Gram matrix"
    importance = _relative_weight_magnitude(weight, group_size)
    energy = output_error(weight, statistics.gram).clamp(min=torch.finfo(torch.float32).tiny)
    best: AwqChoice | None = None
    for alpha in ALPHAS:
        scale = smoothing_scale(statistics.mean_magnitude, importance, alpha)
        scaled = weight * scale
        block_scales = int4_scales(scaled, group_size)
        quantized = dequantize_int4(quantize_int4(scaled, block_scales), block_scales) / scale
        error = float(output_error(quantized - weight, statistics.gram) / energy)
        if best is None or error < best.error:
            best = AwqChoice(alpha, 1.0 / scale, error)
    assert best is not None
    return best


def smoothing_scale(mean_magnitude: Tensor, importance: Tensor, alpha: float) -> Tensor:
    """(in,) factor on the weight's columns: balanced so that the largest times the smallest is 1."""
    tiny = torch.finfo(torch.float32).tiny
    scale = (mean_magnitude.pow(alpha) / (importance.pow(1 - alpha) + tiny)).clamp(*_LIMITS)
    return scale / (scale.max() * scale.min()).sqrt()


def _relative_weight_magnitude(weight: Tensor, group_size: int) -> Tensor:
    """(in,) mean over rows of |W| / the largest magnitude of its block."""
    blocks = weight.abs().unflatten(1, (-1, group_size))
    largest = blocks.amax(dim=2, keepdim=True) + torch.finfo(torch.float32).tiny
    relative: Tensor = (blocks / largest).flatten(1)
    return relative.mean(dim=0)
