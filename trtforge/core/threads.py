"""How OpenMP threads wait for each other; it matters on machines with other load."""

import os

_SPINS = "300"


def wait_briefly() -> None:
    """Let waiting threads spin briefly, then sleep. Must be called before torch is imported; children inherit it.

    GNU OpenMP spins for milliseconds by default. That is right on idle cores, but if another process occupies one,
    every parallel operation waits for its turn: whole runs took five to ten times as long. A value set by the user is
    kept.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
