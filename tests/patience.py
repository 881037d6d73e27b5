"""How long tests wait for what should come soon: only a hang takes that long, also on a machine that is busy."""

import time
from collections.abc import Callable

PATIENCE = 150.0
"""Seconds."""


def eventually(check: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether `check` comes true in time."""
    until = time.monotonic() + seconds
    while not check():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
