"""Clones and hard links of files; plain copies where the file system supports neither."""

import fcntl
import os
import shutil
import sys
from pathlib import Path

_FICLONE = 0x40049409
"""Linux ioctl: share the blocks of another file until either is written (linux/fs.h); XFS, Btrfs, bcachefs."""


def clone_file(source: Path, target: Path) -> None:
    """Copy `source` to `target`, which must not exist; free on file systems with clones. Raises OSError."""
    with source.open("rb") as original, target.open("xb") as copy:
        if sys.platform == "linux":
            try:
                fcntl.ioctl(copy.fileno(), _FICLONE, original.fileno())
                return
            except OSError:
                pass  # clones are not supported, or the files are on different file systems
    shutil.copyfile(source, target)


def copy_directory(source: Path, target: Path) -> None:
    """Copy the files below `source` to `target`, which must not exist. Raises the OSError of the first that fails.

    Unlike this, shutil.copytree continues after an error and raises one with the text of all errors.
    """
    target.mkdir()
    for path in sorted(source.iterdir()):
        (copy_directory if path.is_dir() else shutil.copyfile)(path, target / path.name)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy if that is not possible. Raises OSError."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
