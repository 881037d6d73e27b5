"""Where trtforge keeps what later builds can use."""

import os
import sys
from pathlib import Path

VARIABLE = "TRTFORGE_CACHE"
_OFF = ("off", "none")


def cache_directory() -> Path | None:
    """The user's cache, by TRTFORGE_CACHE or the platform's rule; None where TRTFORGE_CACHE is off or none."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() in _OFF:
        return None
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "trtforge"
    base = os.environ.get("XDG_CACHE_HOME", "")  # relative ones are to be ignored (XDG base directory specification)
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "trtforge"
