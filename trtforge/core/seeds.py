"""Seeds of requests without one."""

import random

_BITS = 31
"""Width of seeds that all servers accept."""


def seed_of(given: int | None, *, draws: bool) -> int | None:
    """The seed of one request: a random one if it samples tokens (`draws`) and `given` is None.

    Engines give equal requests without a seed the same answer.
    """
    return random.getrandbits(_BITS) if draws and given is None else given
