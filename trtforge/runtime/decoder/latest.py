"""Tokens that a step computes while only the device knows them."""

import numpy as np
from torch import Tensor

from trtforge.runtime.cuda.pinned import sent
from trtforge.runtime.scheduling.integers import Ints


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
