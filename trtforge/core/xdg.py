"""Directories for a user's state and cache, by the XDG base directory specification."""

import os
from pathlib import Path


def xdg_directory(variable: str, below_home: str) -> Path:
    """trtforge's directory below the one that `variable` names, else below ~/`below_home`.

    Raises RuntimeError if that needs a home directory and the user has none, as in some containers.
    """
    base = Path(os.environ.get(variable, ""))  # relative paths are ignored, as the specification requires
    return (base if base.is_absolute() else Path.home() / below_home) / "trtforge"
