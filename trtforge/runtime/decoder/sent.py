"""A step's integers on their way to the device, and the tokens that are there before the host knows them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trtforge.runtime.scheduling.batch import Ints


def sent(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The numbers on the device. A GPU copies them when it gets there; the host does not wait for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Staging:
    """Memory of the host whose contents `target`, int64 (rows, columns), gets.

    A GPU copies it when it gets there; there are two that take turns, so that one is filled meanwhile.
    """

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._turns = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=target.is_cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._turns] if target.is_cuda else []
        self._turn = 0

    def filled_next(self, rows: int) -> Ints:
        """The first `rows` rows of what is sent next, zeroed."""
        self._turn = 1 - self._turn
        if self._copied:
            self._copied[self._turn].synchronize()
        numbers: Ints = self._turns[self._turn][:rows].numpy()
        numbers[:] = 0
        return numbers

    def send(self, rows: int) -> None:
        """Copy the first `rows` rows."""
        self._target[:rows].copy_(self._turns[self._turn][:rows], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()


def put_latest(target: Tensor, tokens: Ints, latest: Tensor | None) -> None:
    """Fill in the tokens of a step that only the device knows yet.

    `latest` (rows,): the tokens that the rows of the step before sample. `tokens`, with which `target` begins, has
    -1 - i for that of row i (`Deferred.assume`).
    """
    if latest is None:
        return
    if np.array_equal(tokens, -1 - np.arange(len(latest))):  # the same rows again
        target[: len(tokens)].copy_(latest)
        return
    places = np.flatnonzero(tokens < 0)
    target[sent(places, target.device)] = latest[sent(-1 - tokens[places], target.device)]
