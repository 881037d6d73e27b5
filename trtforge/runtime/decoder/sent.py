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
