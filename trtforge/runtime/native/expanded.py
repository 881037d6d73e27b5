"""Linear layers with 16-, 8- or 4-bit weights on any processor (source/expanded.cpp), for float32 and bfloat16."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.runtime.native.bindings import TYPES, Native
from trtforge.runtime.native.structures import FORMATS, INPUTS, ExpandedLinear
from trtforge.runtime.native.tiles import TILE

Format = Literal["bfloat16", "float16", "int8", "e4m3", "int4", "e2m1"]
Inputs = Literal["as they are", "e4m3", "int8", "e4m3 by row", "nvfp4", "int8 by group"]


@dataclass(frozen=True)
class ExpandedLayer:
    """y = factor x round(x prequant / activation_scale) W^T + bias, for (out, in) weights W.

    `weight`: packed by `tiles` for its format. float32 `scales`: (out / 32, groups, 32), `prequant` (in,), `bias`
    (out,). E2M1 has groups of 16.
    `inputs`: how activations are rounded. "e4m3 by row" divides each row by its own scale, at least `activation_scale`,
    and multiplies the row's outputs by it. "nvfp4" gives E2M1 with an E4M3 scale for each 16 inputs, without
    `prequant`. "int8 by group" is `round_by_group`, with the groups of the INT4 weights' scales.
    """

    format: Format
    weight: Tensor
    outputs: int
    scales: Tensor | None = None
    bias: Tensor | None = None
    prequant: Tensor | None = None
    inputs: Inputs = "as they are"
    activation_scale: float = 1.0
    factor: float = 1.0


def row_scales(scales: Tensor) -> Tensor:
    """`ExpandedLayer.scales` from one scale per output (out,)."""
    return scales.float().reshape(-1, 1, TILE).contiguous()


def linear_expanded(kernels: Native, x: Tensor, layer: ExpandedLayer) -> Tensor:
    """The layer's outputs for x (..., in), in the dtype of x."""
    assert layer.format != "e2m1" or (layer.scales is not None and layer.scales.shape[1] * NVFP4_BLOCK == x.shape[-1])
    x = x.contiguous()
    inputs = x.shape[-1]
    y = x.new_empty(*x.shape[:-1], layer.outputs)
    given = ExpandedLinear(
        x=x.data_ptr(),
        weight=layer.weight.data_ptr(),
        scales=_address(layer.scales),
        bias=_address(layer.bias),
        prequant=_address(layer.prequant),
        y=y.data_ptr(),
        rows=x.numel() // inputs,
        inputs=inputs,
        outputs=layer.outputs,
        group=inputs if layer.scales is None else inputs // layer.scales.shape[1],
        format=FORMATS.index(layer.format),
        kind=INPUTS.index(layer.inputs),
        factor=layer.factor,
        activation_scale=layer.activation_scale,
    )
    kernels.run("linear_expanded", TYPES[x.dtype], given)
    return y


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype is torch.float32
    assert tensor.is_contiguous()
    return tensor.data_ptr()
