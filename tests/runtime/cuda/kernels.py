"""The Triton kernels of this machine: on its GPU, else on the CPU by Triton's interpreter (tests/conftest.py)."""

import torch
import triton

from trtforge.runtime.cuda import paged_kernels
from trtforge.runtime.cuda.paged_attention import PagedAttention

DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")


def paged(processors: int = 16) -> PagedAttention:
    """Attention for a GPU of so few multiprocessors that tests compute one split and several."""
    return PagedAttention(paged_kernels, processors)
