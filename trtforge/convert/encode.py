"""What becomes of a slab of source rows: the arithmetic that each kind of target applies to a rank's part of it.

Only conversions that compute something import this (and so torch).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtforge.core.dtypes import Dtype
from trtforge.core.errors import ForgeError
from trtforge.formats.calibration import Calibration
from trtforge.models.content import (
    ActivationScale,
    Cast,
    Content,
    Fp8Weight,
    Int4Weight,
    KvScale,
    PreQuantScale,
    Target,
    WeightScale,
)
from trtforge.models.split import Cut
from trtforge.models.transforms import TORCH, fp8_scale, int4_scales, pack_int4, quantize_fp8, quantize_int4

Bytes = NDArray[np.uint8]
Part = NDArray[Any]
"""(rows, columns) of a slab, which others read too: nothing here changes it."""

Encode = Callable[[Part, Dtype, Cut], Part]
"""A rank's part of a source of this dtype to the bytes of the target, in any shape."""


def encoder(target: Target, calibration: Calibration | None) -> Encode:
    """The function for a target that is cast, or quantised with a scale that is known before."""
    match target.content:
        case Cast(plus_one=plus_one):
            return partial(_cast, dtype=TORCH[target.spec.dtype.name], name=target.spec.name, plus_one=plus_one)
        case Fp8Weight(scaled_with=modules):
            scale = fp8_scale(_largest_weight(_needed(calibration), modules))
            return lambda part, dtype, cut: _bytes(quantize_fp8(_tensor(part, dtype), scale))
        case _:
            raise AssertionError(f"{target.spec.name} is not made row by row")


def int4_encoder(
    content: Int4Weight, calibration: Calibration | None, model_dtype: Dtype
) -> Callable[[Part, Dtype, Cut], tuple[Bytes, Bytes]]:
    """The function for an INT4 weight: its packed codes, and the block scales that belong to them."""
    prequant = _shared_pre_quant_scale(_needed(calibration), content.modules, model_dtype).float()

    def encode(part: Part, dtype: Dtype, cut: Cut) -> tuple[Bytes, Bytes]:
        folded = _tensor(part, dtype).float() / prequant[cut.cols.start : cut.cols.stop]
        scales = int4_scales(folded, content.group_size)
        return _bytes(pack_int4(quantize_int4(folded, scales))), _bytes(scales)

    return encode


def absorbed(query: Part, key: Part, dtypes: tuple[Dtype, ...], nope: int, target: Dtype) -> Bytes:
    """One head of an Absorbed target, computed as the converter's einsum: in the checkpoint's dtype."""
    queries, keys = (
        _tensor(part, dtype).to(TORCH[target.name]) for part, dtype in zip((query, key), dtypes, strict=True)
    )
    return _bytes(torch.cat((torch.einsum("dq,dk->kq", queries[:nope], keys[:nope]), queries[nope:])))


def _cast(part: Part, source: Dtype, cut: Cut, *, dtype: torch.dtype, name: str, plus_one: bool) -> Bytes:
    values = _tensor(part, source)
    result = (values.float() + 1).to(dtype) if plus_one else values.to(dtype)
    if dtype is torch.float16 and values.dtype is not torch.float16 and not bool(torch.isfinite(result).all()):
        raise ForgeError(
            f"{name}: a value does not fit float16 (largest 65504), or is no number",
            hint="Use --dtype bfloat16; if that fails in verify too, the checkpoint is damaged.",
        )
    return _bytes(result)


def computed(content: Content, calibration: Calibration | None, tp_rank: int, model_dtype: Dtype) -> Bytes:
    """A target that comes from the calibration alone."""
    match content:
        case WeightScale(modules=modules):
            return _bytes(fp8_scale(_largest_weight(_needed(calibration), modules)))
        case ActivationScale(modules=modules):
            amax = [_needed(calibration).input_amax(module) for module in modules]
            return _bytes(fp8_scale(torch.stack(amax).amax(dim=0)))
        case PreQuantScale(modules=modules, cuts=cuts):
            columns = cuts[tp_rank].cols
            scale = _shared_pre_quant_scale(_needed(calibration), modules, model_dtype)
            return _bytes(scale[columns.start : columns.stop])
        case KvScale(layer=layer):
            # ModelOpt never goes below 1 (export/postprocess.py), and TensorRT-LLM's converters write 1.
            amax_kv = calibration.kv_amax(layer) if calibration is not None else None
            return _bytes(torch.ones(1) if amax_kv is None else fp8_scale(amax_kv).clamp(min=1.0))
        case _:
            raise AssertionError(f"{content} is made of source tensors")


def _tensor(part: Part, dtype: Dtype) -> Tensor:
    """The numbers that a slab's integers stand for."""
    return torch.from_numpy(part).view(TORCH[dtype.name])


def _bytes(values: Tensor) -> Bytes:
    flat: Bytes = values.contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def _shared_pre_quant_scale(calibration: Calibration, modules: tuple[str, ...], dtype: Dtype) -> Tensor:
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
