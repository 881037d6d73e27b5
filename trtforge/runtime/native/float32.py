"""Linear layers in float32 by the kernels (source/float32.cpp)."""

import torch
from torch import Tensor

from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.structures import FloatLinear


def linear(kernels: Native, x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """x W^T + bias in float32: x (..., inputs), weight packed by `pack_float32`."""
    if x.dtype is not torch.float32:
        raise TypeError(f"the products are for float32, not {x.dtype}")
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], outputs)
    inputs = x.shape[-1]
    given = FloatLinear(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        rows=x.numel() // inputs,
        inputs=inputs,
        outputs=outputs,
    )
    kernels.run("linear_float32", given)
    return y
