"""What becomes of a slab of source rows: the function that each kind of target applies to a rank's part of it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from trtforge.core.dtypes import Dtype
from trtforge.core.errors import ForgeError
from trtforge.formats.calibration import Calibration
from trtforge.models.content import (
    ActivationScale,
    Cast,
    Content,
    Fp8Weight,
    Int4Scales,
    Int4Weight,
    KvScale,
    PreQuantScale,
    Target,
    WeightScale,
)
from trtforge.models.split import Cut
from trtforge.models.transforms import TORCH, fp8_scale, int4_scales, pack_int4, quantize_fp8, quantize_int4

Encode = Callable[[Tensor, Cut], Tensor]
"""(rows, columns of the cut) of the source to the bytes-to-be of the target."""


def slab_encoder(target: Target, calibration: Calibration | None, model_dtype: Dtype) -> Encode:
    """The function for a target that is made of source tensors."""
    content = target.content
    match content:
        case Cast(plus_one=plus_one):
            dtype = TORCH[target.spec.dtype.name]
            return partial(_cast, dtype=dtype, name=target.spec.name, plus_one=plus_one)
        case Fp8Weight(scaled_with=modules):
            scale = fp8_scale(_largest_weight(_needed(calibration), modules))
            return lambda slab, cut: quantize_fp8(slab, scale)
        case Int4Weight(modules=modules, group_size=group):
            prequant = shared_pre_quant_scale(_needed(calibration), modules, model_dtype).float()

            def codes(slab: Tensor, cut: Cut) -> Tensor:
                folded = slab.float() / prequant[cut.cols.start : cut.cols.stop]
                return pack_int4(quantize_int4(folded, int4_scales(folded, group)))

            return codes
        case Int4Scales(modules=modules, group_size=group):
            prequant = shared_pre_quant_scale(_needed(calibration), modules, model_dtype).float()
            return lambda slab, cut: int4_scales(slab.float() / prequant[cut.cols.start : cut.cols.stop], group)
        case _:
            raise AssertionError(f"{target.spec.name} is not made of source tensors")


def _cast(slab: Tensor, cut: Cut, *, dtype: torch.dtype, name: str, plus_one: bool) -> Tensor:
    result = (slab.float() + 1).to(dtype) if plus_one else slab.to(dtype)
    if dtype is torch.float16 and slab.dtype is not torch.float16 and not bool(torch.isfinite(result).all()):
        raise ForgeError(
            f"{name}: a value does not fit float16 (largest 65504), or is no number",
            hint="Use --dtype bfloat16; if that fails in verify too, the checkpoint is damaged.",
        )
    return result


def computed(content: Content, calibration: Calibration | None, tp_rank: int, model_dtype: Dtype) -> Tensor:
    """The tensor of a target that comes from the calibration alone."""
    match content:
        case WeightScale(modules=modules):
            return fp8_scale(_largest_weight(_needed(calibration), modules))
        case ActivationScale(modules=modules):
            amax = [_needed(calibration).input_amax(module) for module in modules]
            return fp8_scale(torch.stack(amax).amax(dim=0))
        case PreQuantScale(modules=modules, cuts=cuts):
            columns = cuts[tp_rank].cols
            scale = shared_pre_quant_scale(_needed(calibration), modules, model_dtype)
            return scale[columns.start : columns.stop].contiguous()
        case KvScale(layer=layer):
            # ModelOpt never goes below 1 (export/postprocess.py), and TensorRT-LLM's converters write 1.
            amax_kv = calibration.kv_amax(layer) if calibration is not None else None
            return torch.ones(1) if amax_kv is None else fp8_scale(amax_kv).clamp(min=1.0)
        case _:
            raise AssertionError(f"{content} is made of source tensors")


def shared_pre_quant_scale(calibration: Calibration, modules: tuple[str, ...], dtype: Dtype) -> Tensor:
    """(in,) of the model's dtype: the mean over linears that read one input (ModelOpt `preprocess_linear_fusion`)."""
    scales = torch.stack([calibration.pre_quant_scale(module) for module in modules])
    return scales.mean(dim=0).to(TORCH[dtype.name])


def _largest_weight(calibration: Calibration, modules: tuple[str, ...]) -> Tensor:
    return torch.stack([calibration.weight_amax(module) for module in modules]).amax(dim=0)


def _needed(calibration: Calibration | None) -> Calibration:
    if calibration is None:
        raise ForgeError(
            "this format needs a calibration", hint="Run `trtforge calibrate` and give its result as --calibration DIR."
        )
    return calibration
