"""Smoothing vectors, which multiply inputs and divide weights, and the scaling factors that depend on them.

As in NVIDIA ModelOpt: AWQ's is the mean over the linears that read one input (export/quant_utils.py,
`preprocess_linear_fusion`); SmoothQuant's, with α = 1, the inverse of each input channel's amax (model_calib.py).
"""

import torch
from torch import Tensor

from trtforge.core.dtypes import Dtype
from trtforge.core.errors import ForgeError
from trtforge.formats.calibration import Calibration
from trtforge.models.content import ActivationScale, WeightScale
from trtforge.models.formats import Smoothing
from trtforge.models.transforms import PRE_QUANT_SCALE_BOUNDS, TORCH


def needed(calibration: Calibration | None) -> Calibration:
    """The calibration. Raises ForgeError if it is None."""
    if calibration is None:
        raise ForgeError(
            "this format needs a calibration", hint="Run `trtforge calibrate` and give its result as --calibration DIR."
        )
    return calibration


def stored_vector(calibration: Calibration, modules: tuple[str, ...], smoothing: Smoothing, dtype: Dtype) -> Tensor:
    """(in,) of the model's dtype: the factors by which the runtime multiplies inputs."""
    return _vector(calibration, modules, smoothing).to(TORCH[dtype.name])


def folding_vector(calibration: Calibration, modules: tuple[str, ...], smoothing: Smoothing, dtype: Dtype) -> Tensor:
    """(in,) float32 divisors of the weights: AWQ divides by the rounded vector, SmoothQuant by the exact one."""
    if smoothing == "awq":
        return stored_vector(calibration, modules, smoothing, dtype).float()
    return _vector(calibration, modules, smoothing)


def activation_scale(calibration: Calibration, content: ActivationScale) -> Tensor:
    """(1,) float32 scaling factor of the input; 1 if every input was zero.

    As in ModelOpt, linears that share one vector use their own vectors here; the largest of their amax values also
    covers the mean vector.
    """

    def largest(module: str) -> Tensor:
        if content.smoothing is None:
            return calibration.input_amax(module)
        vector = _vector(calibration, (module,), content.smoothing)
        return (calibration.input_channel_amax(module) * vector).amax().reshape(1)

    return _scale(torch.stack([largest(module) for module in content.modules]).amax(dim=0), content.bound)


def weight_scale(calibration: Calibration, content: WeightScale, tp_rank: int, dtype: Dtype) -> Tensor:
    """(groups,) float32 scaling factors, one for each group of modules on a rank."""
    fold = None
    if content.smoothed_with:
        assert content.smoothing is not None
        fold = folding_vector(calibration, content.smoothed_with, content.smoothing, dtype)

    def largest(module: str) -> Tensor:
        if fold is None:
            return calibration.weight_amax(module)
        return (calibration.weight_column_amax(module) / fold).amax().reshape(1)

    amax = [torch.stack([largest(module) for module in group]).amax() for group in content.groups[tp_rank]]
    return _scale(torch.stack(amax), content.bound)


def _scale(amax: Tensor, bound: float) -> Tensor:
    return torch.where(amax > 0, amax.float() / bound, torch.ones_like(amax))


def _vector(calibration: Calibration, modules: tuple[str, ...], smoothing: Smoothing) -> Tensor:
    if smoothing == "awq":
        return torch.stack([calibration.pre_quant_scale(module) for module in modules]).mean(dim=0)
    amax = torch.stack([calibration.input_channel_amax(module) for module in modules]).amax(dim=0)
    return torch.where(amax > 0, (1.0 / amax).clamp(*PRE_QUANT_SCALE_BOUNDS), torch.ones_like(amax))
