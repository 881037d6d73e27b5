"""Launches Triton kernels."""

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor


class Launcher:
    """Launches kernels on one GPU.

    At every launch, Triton determines how the arguments specialise the kernel: whether an address or integer is a
    multiple of 16, and whether an integer is 1 or needs 64 bits (python/triton/runtime/jit.py). This class caches the
    compiled kernels by the same properties, and launches them without that overhead. `early`: kernels start before the
    previous ones end, and wait for them in the kernel (programmatic dependent launch, SM 9.0 and later).
    """

    def __init__(self, *, early: bool, index: int = 0) -> None:
        self._early = early
        self._index = index
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        *arguments: Any,
        warps: int = 4,
        stages: int = 3,
        **constants: Any,
    ) -> None:
        """Launch `kernel`. `constants`: in the order of its parameters, which follow `arguments`; EARLY comes last."""
        constants["EARLY"] = self._early
        key = id(kernel), warps, stages, *constants.values(), *map(_kind, arguments)
        known = self._compiled.get(key)
        if known is not None:
            stream = torch._C._cuda_getCurrentRawStream(self._index)  # as Triton's driver does
            packed = known.function, known.packed_metadata, None, None, None  # no launch hooks
            known.run(*grid, stream, *packed, *arguments, *constants.values())
            return
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": self._early}
        made = kernel[grid](*arguments, **constants, **options, enable_fp_fusion=True)  # Triton 3.10's default is False
        if made is not None:  # None from Triton's interpreter, which compiles nothing
            self._compiled[key] = made


@functools.cache
def launcher_for(index: int) -> Launcher:
    """The launcher of a GPU."""
    return Launcher(early=torch.cuda.get_device_capability(index) >= (9, 0), index=index)


def _kind(argument: Tensor | float) -> Hashable:
    """The properties of an argument that the compiled code depends on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15 == 0
    if isinstance(argument, int):
        return argument & 15 == 0, argument == 1, argument >> 31
    return None
