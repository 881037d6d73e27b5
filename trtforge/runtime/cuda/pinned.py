"""Host memory that a GPU copies from and to by itself.

torch's own pinned tensors are rounded up to powers of two (ATen/core/CachingHostAllocator.h), which may be twice the
memory that was asked for and counted.
"""

import weakref

import torch
from torch import Tensor


def pin(memory: Tensor) -> None:
    """Lock a CPU tensor's memory as long as the tensor lives. Raises RuntimeError if the driver refuses."""
    driver, address = torch.cuda.cudart(), memory.data_ptr()
    torch.cuda.check_error(driver.cudaHostRegister(address, memory.nbytes, 0))
    weakref.finalize(memory, driver.cudaHostUnregister, address)
