"""Seeds of requests that give none."""

import random

_BITS = 31
"""Seeds of every width that servers take."""


def random_seed() -> int:
    """A seed for one request: engines answer equal requests without one alike, also where tokens are drawn."""
    return random.getrandbits(_BITS)
