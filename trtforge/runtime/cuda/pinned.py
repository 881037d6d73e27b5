"""Pinned host memory, which a GPU can copy from and to asynchronously.

torch rounds the size of pinned tensors up to a power of two (ATen/core/CachingHostAllocator.h), which may be twice the
requested and counted memory. So `pin` is for large tensors, and the other functions for a step's integers.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_INTEGERS_OF_16_BYTES = 2


def pin(memory: Tensor) -> None:
    """Page-lock a CPU tensor's memory as long as the tensor lives. Raises RuntimeError if the driver refuses."""
    driver, address = torch.cuda.cudart(), memory.data_ptr()
    torch.cuda.check_error(driver.cudaHostRegister(address, memory.nbytes, 0))
    weakref.finalize(memory, driver.cudaHostUnregister, address)


def sent(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device. To a GPU, the copy is asynchronous: the host does not wait."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def sent_column(values: Sequence[float] | Sequence[int], device: torch.device) -> Tensor:
    """Like `sent`, as (values, 1): int64 for integers, else float32."""
    numbers = np.array(values)
    kind = np.int64 if numbers.dtype.kind == "i" else np.float32
    return sent(numbers.astype(kind), device).unsqueeze(1)


def sent_together(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Like `sent`, in one transfer; each array begins at a multiple of 16 bytes, which lets kernels load faster."""
    starts = np.cumsum([0, *(each.size + each.size % _INTEGERS_OF_16_BYTES for each in arrays)]).tolist()
    staged = torch.empty(starts[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    numbers = staged.numpy()
    for start, each in zip(starts[:-1], arrays, strict=True):
        numbers[start : start + each.size] = each.reshape(-1)
    moved = staged.to(device, non_blocking=True)
    places = zip(starts[:-1], arrays, strict=True)
    return [moved[start : start + each.size].view(each.shape) for start, each in places]


class Staging:
    """Host buffers for copies to `target`, int64 (rows, columns).

    Copies to a GPU are asynchronous. Two buffers alternate, so that one can be filled while the other is copied.
    """

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._turns = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=target.is_cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._turns] if target.is_cuda else []
        self._turn = 0

    def filled_next(self, rows: int) -> npt.NDArray[np.int64]:
        """The first `rows` rows of the buffer to send next, zeroed."""
        self._turn = 1 - self._turn
        if self._copied:
            self._copied[self._turn].synchronize()
        numbers: npt.NDArray[np.int64] = self._turns[self._turn][:rows].numpy()
        numbers[:] = 0
        return numbers

    def send(self, rows: int) -> None:
        """Copy the first `rows` rows to `target`."""
        self._target[:rows].copy_(self._turns[self._turn][:rows], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
