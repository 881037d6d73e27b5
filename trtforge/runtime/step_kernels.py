"""The kernels of a device for what lies between products and attention: in C++ on the CPU, in Triton's language on CUDA."""

import torch

from trtforge.runtime.cuda.fused import FusedKernels, fused_for
from trtforge.runtime.native.bindings import Native, native_for

StepKernels = Native | FusedKernels


def step_kernels_for(device: torch.device, dtype: torch.dtype) -> StepKernels | None:
    """The kernels for tensors on this device and of this dtype, if there are any."""
    return native_for(device, dtype) or fused_for(device, dtype)
