"""Makes oneMKL choose the kernels of torch's elementwise CPU functions before several threads call them.

oneMKL 2024.2, which torch's wheels contain, chooses the kernel of a function in its first call. If several threads make
that call at the same time, one of them may use a kernel of low accuracy: cosines are then wrong by up to 1.5e-4, and
logits by 0.005 (https://github.com/pytorch/pytorch/issues/188792). After a call by one thread, all threads use the
accurate kernel.
"""

import torch

_FUNCTIONS = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.cosh,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.expm1,
    torch.lgamma,
    torch.log,
    torch.log10,
    torch.log1p,
    torch.log2,
    torch.sin,
    torch.sinh,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)
"""Functions that ATen's cpu/vml.h passes to oneMKL, in this or another release."""


def choose_kernels() -> None:
    """Call each function on one float32 and one float64 number; takes about 20 ms the first time."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for function in _FUNCTIONS:
            function(number)
