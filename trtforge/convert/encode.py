"""Encodes slabs of source rows: the arithmetic of each kind of target, applied to a rank's part of a slab.

Imports torch, so conversions that only copy must not import this module.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtforge.convert.smoothing import activation_scale, needed, stored_vector, weight_scale
from trtforge.core.dtypes import Dtype
from trtforge.core.errors import ForgeError
from trtforge.formats.calibration import Calibration
from trtforge.formats.shards import TensorSpec
from trtforge.models.content import ActivationScale, Cast, Content, KvScale, PreQuantScale, WeightScale
from trtforge.models.formats import CACHE_BOUNDS
from trtforge.models.split import Cut
from trtforge.models.torch_tensors import all_finite
from trtforge.models.transforms import TORCH

Bytes = NDArray[np.uint8]
Part = NDArray[Any]
"""(rows, columns) of a slab; shared with other ranks, so it must not be modified."""

Encode = Callable[[Part, Dtype, Cut], Part]
"""Maps a rank's part of a source, the source's dtype and the cut to the target's bytes, in any shape."""


def caster(target: TensorSpec, content: Cast) -> Encode:
    """The encoder of a Cast target."""
    return partial(_cast, dtype=TORCH[target.dtype.name], name=target.name, plus_one=content.plus_one)


def absorbed(query: Part, key: Part, dtypes: tuple[Dtype, ...], nope: int, target: Dtype) -> Bytes:
    """One head of an Absorbed target, computed in the checkpoint's dtype, as in TensorRT-LLM's converter."""
    queries, keys = (
        as_tensor(part, dtype).to(TORCH[target.name]) for part, dtype in zip((query, key), dtypes, strict=True)
    )
    return as_bytes(torch.cat((torch.einsum("dq,dk->kq", queries[:nope], keys[:nope]), queries[nope:])))


def _cast(part: Part, source: Dtype, cut: Cut, *, dtype: torch.dtype, name: str, plus_one: bool) -> Bytes:
    values = as_tensor(part, source)
    result = (values.float() + 1).to(dtype) if plus_one else values.to(dtype)
    narrows = dtype is torch.float16 and values.dtype is not torch.float16
    # non-finite source values were allowed when the source was read
    if narrows and not all_finite(result) and bool((values.isfinite() & ~result.isfinite()).any()):
        raise ForgeError(f"{name}: a value does not fit float16 (largest 65504)", hint="Use --dtype bfloat16.")
    return as_bytes(result)


def computed(content: Content, calibration: Calibration | None, tp_rank: int, model_dtype: Dtype) -> Bytes:
    """The bytes of a target that depends on the calibration alone."""
    match content:
        case WeightScale():
            return as_bytes(weight_scale(needed(calibration), content, tp_rank, model_dtype))
        case ActivationScale():
            return as_bytes(activation_scale(needed(calibration), content))
        case PreQuantScale(modules=modules, smoothing=smoothing, cuts=cuts, experts=experts):
            columns = cuts[tp_rank].cols
            vector = stored_vector(needed(calibration), modules, smoothing, model_dtype)[columns.start : columns.stop]
            return as_bytes(vector if experts is None else vector.repeat(experts, 1))
        case KvScale(layer=layer, format=format):
            # ModelOpt's FP8 scales never go below 1 (export/postprocess.py), and TensorRT-LLM's converters write 1.
            searched = calibration.kv_scale(layer, format) if calibration is not None else None
            if searched is not None:
                return as_bytes(searched)
            amax = calibration.kv_amax(layer) if calibration is not None else None
            scale = torch.ones(1) if amax is None else amax / CACHE_BOUNDS[format]
            return as_bytes(scale.clamp(min=1.0) if format == "fp8" else scale)
        case _:
            raise AssertionError(f"{content} is made of source tensors")


def as_tensor(part: Part, dtype: Dtype) -> Tensor:
    """A slab's integers reinterpreted as values of `dtype`."""
    return torch.from_numpy(part).view(TORCH[dtype.name])


def as_bytes(values: Tensor) -> Bytes:
    flat: Bytes = values.contiguous().view(-1).view(torch.uint8).numpy()
    return flat
