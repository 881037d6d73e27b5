"""Where this user's servers in the background keep their files, and their names.

Light, because a shell that completes a name waits for it.
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
    """One directory for each server is in it. Raises ForgeError if the user has no home directory."""
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
    """A name that is not taken, from a repository's path: of its build if it is in one, else its own; with a number."""
    name = _OTHER.sub("-", base_name(repository)).strip("-._")[:_LONGEST] or REPOSITORY
    number = 1
    while (found := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return found
