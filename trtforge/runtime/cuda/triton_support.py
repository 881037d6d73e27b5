"""Whether Triton's kernels run on a device. TRTFORGE_KERNELS=torch turns them off."""

import functools
import importlib.util
import logging
import os
import subprocess

import torch

from trtforge.runtime.native.bindings import VARIABLE

_LOG = logging.getLogger(__name__)
_LEAST_SM = (8, 0)  # compute capability that Triton supports
_E4M3_SM = (8, 9)  # from which GPUs convert to E4M3 and back


def runs_triton(device: torch.device) -> bool:
    """Whether kernels in Triton's language compute on this device."""
    return device.type == "cuda" and os.environ.get(VARIABLE) != "torch" and _works(device.index or 0)


@functools.cache
def _works(index: int) -> bool:
    """Whether Triton can launch kernels: it compiles its launcher with the machine's C compiler."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(index) < _LEAST_SM:
        return False
    from triton.runtime import driver

    try:
        driver.active.get_current_device()
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        _LOG.warning("Triton does not work here, torch's slower operations are used: %s", error)
        return False
    return True


@functools.cache
def processors_of(index: int) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def converts_e4m3(index: int) -> bool:
    """Whether a GPU converts numbers to E4M3 and back."""
    return torch.cuda.get_device_capability(index) >= _E4M3_SM


def power_from(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
