"""The Triton kernels of this machine: on its GPU, else on the CPU by Triton's interpreter (tests/conftest.py)."""

import torch
import triton

from tests.runtime import kernel_levels
from trtforge.runtime.cuda import (
    chunk_kernels,
    paged_kernels,
    product_kernels,
    rounding_kernels,
    step_kernels,
    tile_kernels,
)
from trtforge.runtime.cuda.fused import FusedKernels
from trtforge.runtime.cuda.launcher import Launcher, launcher_for
from trtforge.runtime.cuda.paged_attention import PagedAttention
from trtforge.runtime.cuda.products import Products
from trtforge.runtime.cuda.rounding import Rounding
from trtforge.runtime.decoder.alibi import Alibi
from trtforge.runtime.decoder.scores import FusedScores, Scores, SoftmaxScores

DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
EVERY = kernel_levels.EVERY or DEVICE.type == "cuda"
"""Whether tests shall compute all cases: the interpreter, which is slow, does with `make test-kernels`."""


def launcher() -> Launcher:
    """Of this machine's GPU; the interpreter starts no kernel early."""
    return Launcher(early=False) if DEVICE.type == "cpu" else launcher_for(0)


def paged(processors: int = 16) -> PagedAttention:
    """Attention for a GPU of so few multiprocessors that tests compute one split and several."""
    return PagedAttention(paged_kernels, chunk_kernels, launcher(), processors, DEVICE)


def fused() -> FusedKernels:
    """What lies between products and attention."""
    return FusedKernels(step_kernels, launcher(), e4m3=True)


def products(processors: int = 4, *, e4m3: bool = True) -> Products:
    """Products on a GPU of so few multiprocessors, which converts E4M3 or does not."""
    return Products(product_kernels, tile_kernels, launcher(), processors, DEVICE, e4m3=e4m3)


def scores_of(kv_heads: int, group: int, size: int, cap: float | None, *, alibi: bool, sinks: bool) -> Scores:
    """Of a layer of this machine; sinks are random."""
    scale, heads = size**-0.5, kv_heads * group
    slopes = Alibi(heads, 0, heads, 1.0, False, DEVICE) if alibi else None
    logits = torch.randn(kv_heads, group, 1, 1, device=DEVICE) * 3 if sinks else None
    plain = cap is None and slopes is None and logits is None
    return FusedScores(scale) if plain else SoftmaxScores(scale, cap, slopes, logits)


def rounding() -> Rounding:
    """Activations in the numbers of a format."""
    return Rounding(rounding_kernels, launcher())
