"""The short convolution of linear attention by the kernels (source/convolution.cpp)."""

from torch import Tensor

from trtforge.runtime.native.bindings import TYPES, Native


def convolve(kernels: Native, window: Tensor, taps: Tensor) -> Tensor:
    """silu of each channel's causal convolution with its taps: (rows, tokens, channels).

    window: (rows, tokens + len(taps) - 1, channels); taps: float32 (taps, channels), contiguous.
    """
    window = window.contiguous()
    rows, inputs, channels = window.shape
    tokens = inputs - len(taps) + 1
    y = window.new_empty(rows, tokens, channels)
    sizes = rows, tokens, channels, len(taps)
    kernels.run("convolve", TYPES[window.dtype], window.data_ptr(), taps.data_ptr(), y.data_ptr(), *sizes)
    return y
