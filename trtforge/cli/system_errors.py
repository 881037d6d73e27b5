"""What to tell of exceptions that are no ForgeError: of the file system, of memory, of packages."""

import errno
import sys

from trtforge.core.errors import ForgeError, Where
from trtforge.core.extras import missing_package
from trtforge.core.memory_errors import out_of_memory
from trtforge.core.new_file import SHORTER_NAME
from trtforge.core.reading import CHECK_DISK, disk_fails

_AROUND = 20
"""Characters shown on each side of a byte that is not UTF-8, of which Python makes a lone surrogate."""


def system_failure(error: Exception) -> ForgeError | None:
    """The failure that the machine or the installation caused; None for a mistake of the program."""
    failure = out_of_memory(error)
    if failure is not None:
        return failure
    if isinstance(error, ModuleNotFoundError):
        return missing_package(error, f"trtforge {next(iter(sys.argv[1:]), '')}".strip())
    if isinstance(error, OSError):
        return _of_files(error)
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        said = error.object[max(error.start - _AROUND, 0) : error.end + _AROUND]
        return ForgeError(f"{said!r} is not UTF-8 text", hint="Give UTF-8 text.")
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return ForgeError(
            "no more threads can be started", hint="Raise the limit of processes (`ulimit -u`, the container's pids)."
        )
    cause = error.__context__
    if isinstance(error, RuntimeError) and isinstance(cause, OSError) and cause.errno == errno.ELOOP:
        return _of_files(cause)  # Path.resolve() before Python 3.13
    return None


def _of_files(error: OSError) -> ForgeError:
    where = f"{error.filename}: " if error.filename else ""
    failure = ForgeError(f"{where}{error.strerror or error}", hint=_remedy_of(error))
    return failure.at(Where(str(error.filename))) if error.filename else failure


def _remedy_of(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Choose another place, or run as a user who may read and write there."
    if error.errno == errno.ELOOP:
        return "Remove the symbolic link that leads to itself, or give another path."
    if error.errno == errno.ENAMETOOLONG:
        return SHORTER_NAME
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free space, then run again."
    if error.errno == errno.EPIPE:
        return "Run it with a reader that reads all of the output."
    if disk_fails(error):
        return CHECK_DISK
    return "Add --verbose for the traceback."
