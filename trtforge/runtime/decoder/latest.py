"""Input tokens of a step that only the device knows when the step begins."""

import numpy as np
from torch import Tensor

from trtforge.runtime.cuda.pinned import sent
from trtforge.runtime.scheduling.integers import Ints


def put_latest(target: Tensor, tokens: Ints, latest: Tensor | None) -> None:
    """Replace the placeholders in a step's tokens by tokens that only the device knows yet.

    `latest` (rows,): the tokens sampled for the rows of the previous step. `target` begins with `tokens`, in which
    -1 - i is the placeholder of row i (`Deferred.assume`).
    """
    if latest is None:
        return
    if np.array_equal(tokens, -1 - np.arange(len(latest))):  # the same rows again
        target[: len(tokens)].copy_(latest)
        return
    places = np.flatnonzero(tokens < 0)
    target[sent(places, target.device)] = latest[sent(-1 - tokens[places], target.device)]
