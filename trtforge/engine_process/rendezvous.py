"""The socket path at which the model processes of a Triton server find their engine process."""

import os
import tempfile
from hashlib import sha256
from pathlib import Path

from trtforge.core.errors import ForgeError

RUNTIME_VARIABLE = "TRTFORGE_RUNTIME"
_LONGEST_PATH = 107  # bytes of sun_path in Linux's struct sockaddr_un


def socket_path(engine_model: str, server: int) -> Path:
    """The socket of the engine behind the model `engine_model` of the Triton server with process id `server`.

    It is in the directory that TRTFORGE_RUNTIME names (`trtforge serve` sets it), else in a directory of this server
    below the temporary directory, which only this user can access. Raises ForgeError if others own or can access that
    directory, and if the path is too long.
    """
    chosen = os.environ.get(RUNTIME_VARIABLE)
    directory = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"trtforge-engine-{os.getuid()}-{server}"
    if not chosen:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077 or directory.is_symlink():
            raise ForgeError(
                f"{directory} is not a private directory of this user", hint=f"Remove it, or set {RUNTIME_VARIABLE}."
            )
    path = socket_file(directory, engine_model)
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ForgeError(
            f"the socket path {path} has {len(os.fsencode(path))} bytes, the limit is {_LONGEST_PATH}",
            hint=f"Set TMPDIR (or {RUNTIME_VARIABLE}) to a shorter directory.",
        )
    return path


def socket_file(directory: Path, engine_model: str) -> Path:
    """The socket of a model in a directory; named by a digest of the model's name where the path would be too long."""
    path = directory / f"{engine_model}.sock"
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        return path
    return directory / f"{sha256(engine_model.encode()).hexdigest()[:16]}.sock"
