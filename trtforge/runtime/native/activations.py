"""Ungated activation functions, by the kernels (source/elementwise.cpp)."""

import torch
from torch import Tensor

from trtforge.runtime.native.bindings import ACTIVATIONS, TYPES, Native


def activate(kernels: Native, x: Tensor, activation: str) -> Tensor:
    """activation(x), for x of any shape."""
    x = x.contiguous()
    y = torch.empty_like(x)
    kernels.run("activate", TYPES[x.dtype], ACTIVATIONS[activation], x.data_ptr(), y.data_ptr(), x.numel())
    return y
