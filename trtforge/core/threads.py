"""How OpenMP threads wait for each other, which matters on machines with other load."""

import os
import sys
from functools import cache

_SPINS = "300"


@cache
def wait_briefly() -> bool:
    """Let waiting threads spin briefly, then sleep. Must be called before torch is imported; children inherit it.

    GNU OpenMP spins for milliseconds by default. That suits idle cores, but if another process occupies a core, every
    parallel operation waits for it: whole runs took five to ten times as long. A value set by the user is kept. Returns
    False if another value was set or torch was imported before.
    """
    inherited = os.environ.get("GOMP_SPINCOUNT")
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    return "torch" not in sys.modules if inherited is None else inherited == _SPINS
