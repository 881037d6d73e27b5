"""Seeds of requests that give none."""

import random

_BITS = 31
"""Seeds of every width that servers take."""


def seed_of(given: int | None, *, draws: bool) -> int | None:
    """The seed of one request: a random one if it `draws` tokens and gives none.

    Engines answer equal requests without a seed alike.
    """
    return random.getrandbits(_BITS) if draws and given is None else given
