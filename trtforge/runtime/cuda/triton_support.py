"""Whether Triton kernels run on a device. TRTFORGE_KERNELS=torch turns them off."""

import functools
import importlib.util
import logging
import subprocess

import torch
from packaging.version import Version

from trtforge.models.kernels import FP8_SM, TRITON_SM
from trtforge.runtime.native.compiler import kernels_wanted

_OLDEST = Version("3.5")  # 3.4 compiles neither gdc_launch_dependents nor the branches in the INT4 products
_LOG = logging.getLogger(__name__)


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels compute on this device."""
    return device.type == "cuda" and kernels_wanted() and _works(device.index or 0)


@functools.cache
def _works(index: int) -> bool:
    """Whether Triton can launch kernels: it compiles its launcher with the machine's C compiler."""
    if importlib.util.find_spec("triton") is None or sm_of(index) < TRITON_SM:
        return False
    import triton
    from triton.runtime import driver

    if Version(triton.__version__) < _OLDEST:
        _LOG.warning(
            "Triton %s is older than %s, torch's slower operations are used: torch 2.9 and later bring a newer one",
            triton.__version__,
            _OLDEST,
        )
        return False
    try:
        driver.active.get_current_device()
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        _LOG.warning("Triton does not work here, torch's slower operations are used: %s", error)
        return False
    return True


@functools.cache
def processors_of(index: int) -> int:
    """Number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def converts_e4m3(index: int) -> bool:
    """Whether a GPU has instructions that convert numbers to E4M3 and back, and E4M3 matrix products."""
    return sm_of(index) >= FP8_SM


def sm_of(index: int) -> int:
    """A GPU's compute capability x 10."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def power_from(number: int) -> int:
    """The smallest power of two >= `number`."""
    return 1 << (number - 1).bit_length()
