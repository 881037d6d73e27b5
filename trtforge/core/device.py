"""Choice of the torch device."""

from typing import Literal

from trtforge.core.errors import ForgeError
from trtforge.core.recipe import Device

UsableDevice = Literal["cpu", "cuda"]

BFLOAT16_SM = 80
"""Lowest compute capability x 10 with bfloat16 arithmetic; earlier GPUs emulate it in float32."""

CPU_CACHE_BYTES = 4 << 30
"""Default limit of the KV cache in host memory, over all ranks; other programs need that memory too."""


def usable_device(requested: Device) -> UsableDevice:
    """`cpu` or `cuda`; `auto` is `cuda` if torch can use a GPU. Raises ForgeError if not available."""
    import torch

    if requested == "cuda" and not torch.cuda.is_available():
        raise ForgeError("--device cuda: no CUDA GPU is available", hint="Use --device cpu, or check `nvidia-smi`.")
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return requested
