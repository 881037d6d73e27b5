"""Names and file locations of this user's servers in the background.

Imports little, because shell completion of names waits for it.
"""

import re
from collections.abc import Collection
from pathlib import Path

from trtforge.core.builds import REPOSITORY, base_name
from trtforge.core.errors import ForgeError
from trtforge.core.xdg import xdg_directory

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OTHER = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST = 100  # characters; file systems take 255 bytes


def servers_directory() -> Path:
    """The directory with a subdirectory for each server. Raises ForgeError if the user has no home directory."""
    try:
        return xdg_directory("XDG_STATE_HOME", ".local/state") / "servers"
    except RuntimeError:
        raise ForgeError(
            "this user has no home directory, where the state of servers is kept",
            hint="Set XDG_STATE_HOME to a directory for it.",
        ) from None


def server_names(directory: Path) -> list[str]:
    """The names of the servers in such a directory, in order; none if it cannot be read."""
    try:
        return sorted(path.name for path in directory.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))
    except OSError:
        return []


def new_name(repository: Path, taken: Collection[str]) -> str:
    """An unused name from a repository's path: the name of its build directory if any, else its own, with a number if
    taken."""
    name = _OTHER.sub("-", base_name(repository)).strip("-._")[:_LONGEST] or REPOSITORY
    number = 1
    while (found := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return found
