"""Writes new files for the user, and the error if that fails."""

import errno
from pathlib import Path

from trtforge.core.errors import ForgeError

SHORTER_NAME = "Choose a shorter name."


def write_new(path: Path, text: str) -> None:
    """Write a new file. Raises ForgeError if it exists or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except BaseException:  # a full disk, or an interruption
                path.unlink()
                raise
    except OSError as error:
        raise not_written(path, error) from None


def not_written(path: Path, error: OSError) -> ForgeError:
    """The error for a file that could not be written."""
    if isinstance(error, FileExistsError):
        return ForgeError(f"{path}: {error.strerror}", hint="Choose a file that does not exist yet.")
    if isinstance(error, FileNotFoundError) and not path.parent.exists():
        hint = "Create it, or choose another directory."
        return ForgeError(f"{path}: there is no directory {path.parent}", hint=hint)
    if isinstance(error, FileNotFoundError):  # as in /proc
        return ForgeError(f"{path}: no new files can be created in {path.parent}", hint="Choose another directory.")
    if error.errno == errno.ENAMETOOLONG:
        return ForgeError(f"{path}: {error.strerror}", hint=SHORTER_NAME)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "Free space, then run again." if full else "Choose a directory that you may write to."
    return ForgeError(f"{path} cannot be written: {error.strerror}", hint=hint)
