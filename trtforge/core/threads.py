"""How OpenMP threads wait for one another, which decides how a shared machine feels."""

import os

_SPINS = "300"


def wait_briefly() -> None:
    """Let threads spin a moment, then sleep. Takes effect if called before torch is imported; children inherit it.

    GNU OpenMP's default is to spin for milliseconds: right on idle cores, but where another process has one of them
    every parallel operation waits for its turn, which made whole runs five to ten times slower. A setting of the
    user's own stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
