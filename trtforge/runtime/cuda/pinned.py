"""Host memory that a GPU copies from and to by itself.

torch's own pinned tensors are rounded up to powers of two (ATen/core/CachingHostAllocator.h), which may be twice the
memory that was asked for and counted: `pin` is for large memory, the rest for a step's integers.
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
    """Lock a CPU tensor's memory as long as the tensor lives. Raises RuntimeError if the driver refuses."""
    driver, address = torch.cuda.cudart(), memory.data_ptr()
    torch.cuda.check_error(driver.cudaHostRegister(address, memory.nbytes, 0))
    weakref.finalize(memory, driver.cudaHostUnregister, address)


def sent(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The numbers on the device. A GPU copies them when it gets there; the host does not wait for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def sent_column(values: Sequence[float] | Sequence[int], device: torch.device) -> Tensor:
    """As `sent`: (values, 1), int64 of whole numbers, else float32."""
    numbers = np.array(values)
    kind = np.int64 if numbers.dtype.kind == "i" else np.float32
    return sent(numbers.astype(kind), device).unsqueeze(1)


def sent_together(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """As `sent`, in one transfer; each begins at a multiple of 16 bytes, as kernels prefer."""
    starts = np.cumsum([0, *(each.size + each.size % _INTEGERS_OF_16_BYTES for each in arrays)]).tolist()
    staged = torch.empty(starts[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    numbers = staged.numpy()
    for start, each in zip(starts[:-1], arrays, strict=True):
        numbers[start : start + each.size] = each.reshape(-1)
    moved = staged.to(device, non_blocking=True)
    places = zip(starts[:-1], arrays, strict=True)
    return [moved[start : start + each.size].view(each.shape) for start, each in places]


class Staging:
    """Memory of the host whose contents `target`, int64 (rows, columns), gets.

    A GPU copies it when it gets there; there are two that take turns, so that one is filled meanwhile.
    """

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._turns = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=target.is_cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._turns] if target.is_cuda else []
        self._turn = 0

    def filled_next(self, rows: int) -> npt.NDArray[np.int64]:
        """The first `rows` rows of what is sent next, zeroed."""
        self._turn = 1 - self._turn
        if self._copied:
            self._copied[self._turn].synchronize()
        numbers: npt.NDArray[np.int64] = self._turns[self._turn][:rows].numpy()
        numbers[:] = 0
        return numbers

    def send(self, rows: int) -> None:
        """Copy the first `rows` rows."""
        self._target[:rows].copy_(self._turns[self._turn][:rows], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
