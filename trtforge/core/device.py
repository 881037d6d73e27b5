"""Which device does the work."""

from typing import Literal

from trtforge.core.errors import ForgeError

UsableDevice = Literal["cpu", "cuda"]

CPU_CACHE_BYTES = 4 << 30
"""Most that the KV cache takes of a CPU's memory over all ranks, where no size is asked for: it shares that memory."""


def usable_device(requested: Literal["auto", "cpu", "cuda"]) -> UsableDevice:
    """`cpu` or `cuda`; `auto` takes a GPU where torch can use one. Raises ForgeError for a GPU that is not there."""
    import torch

    if requested == "cuda" and not torch.cuda.is_available():
        raise ForgeError("--device cuda: no CUDA GPU is usable here", hint="Use --device cpu, or check `nvidia-smi`.")
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return requested
