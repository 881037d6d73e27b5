"""Read untrusted files: regular files of limited size, in UTF-8. Every error names the file."""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trtforge.core.errors import AbsentFile, ForgeError

KIB, MIB = 1 << 10, 1 << 20
CHECK_DISK = "Check the disk or network share that it is on."
"""The hint where `disk_fails`."""
_NOT_BLOCKING = getattr(os, "O_NONBLOCK", 0)


def opened(path: Path) -> int:
    """The descriptor of a file to read; a FIFO without a writer does not block. Raises OSError, ValueError."""
    return os.open(path, os.O_RDONLY | _NOT_BLOCKING)


def read_limited(path: Path, limit: int, *, hint: str, absent: str | None = None) -> bytes:
    """The bytes of a regular file of at most `limit` bytes.

    Raises AbsentFile (with the hint `absent`) if it does not exist, ForgeError if it is not a regular file, too large
    or unreadable.
    """
    try:
        descriptor = opened(path)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ForgeError(f"{path}: not a regular file", hint=absent or hint)
            data = file.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AbsentFile(f"{path}: {error.strerror}", hint=absent or hint) from None
    except PermissionError as error:  # nothing is known to be wrong with the file
        raise ForgeError(f"{path}: {error.strerror}", hint="Run as a user who may read it.") from None
    except OSError as error:
        remedy = CHECK_DISK if disk_fails(error) else absent or hint
        raise ForgeError(f"{path}: {error.strerror}", hint=remedy) from None
    except ValueError as error:  # a file name with a zero byte
        raise ForgeError(f"{str(path)!r}: {error}", hint=absent or hint) from None
    if len(data) > limit:
        raise ForgeError(f"{path}: larger than the limit of {limit:,} bytes", hint=hint)
    return data


def disk_fails(error: OSError) -> bool:
    """Whether the disk or network share failed: neither the path nor its permissions are wrong."""
    return error.errno in (errno.EIO, errno.ESTALE)


def as_text(data: bytes, where: str, *, hint: str) -> str:
    """`data` decoded as UTF-8. Raises ForgeError naming `where` and the invalid byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ForgeError(f"{where}: not UTF-8 text (byte {error.start})", hint=hint) from None


def require_linked(paths: Iterable[Path]) -> None:
    """Raise ForgeError for a symbolic link to a file that does not exist, as a copy of a cache may have them."""
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise ForgeError(
                f"{path} is a link to a file that does not exist",
                hint="Download the model again, or copy it with the files that its links lead to (cp -rL).",
            )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system name `path`: those of an open file name none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
