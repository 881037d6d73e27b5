"""Whether Triton's kernels run on a device. TRTFORGE_KERNELS=torch turns them off."""

import functools
import importlib.util
import os

import torch

from trtforge.runtime.native.bindings import VARIABLE


def runs_triton(device: torch.device) -> bool:
    """Whether kernels in Triton's language compute on this device."""
    return device.type == "cuda" and os.environ.get(VARIABLE) != "torch" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def processors_of(index: int) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def power_from(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
