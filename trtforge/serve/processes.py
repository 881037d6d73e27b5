"""Child processes that never outlive us, and what they leave behind: Linux's /proc and /dev/shm, nothing else."""

import ctypes
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "trtforge-serve-"


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """A directory of this process for a server's files. It goes, with the shared memory that has its name, at the end.

    Those of processes that were killed before they could do so go first.
    """
    _remove_stale()
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        remove_shared_memory(path.name)


def remove_shared_memory(prefix: str) -> None:
    """Delete the shared memory that a server killed early left; `prefix` as it was told."""
    for path in _SHARED_MEMORY.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def end_with_parent() -> None:
    """To run in a child before its program: SIGTERM when the parent ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def session_processes(session: int) -> dict[int, str]:
    """Process id to program name of everything that lives in a session (a server and all it started)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and lives_in(session, int(entry.name)):
            with suppress(OSError):
                program = (entry / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
                found[int(entry.name)] = Path(program).name
    return found


def lives_in(session: int, process: int) -> bool:
    """Whether a process is there, has not ended and belongs to the session."""
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return after_name[0] not in "ZX" and int(after_name[3]) == session


def end_session(session: int, patience: float = 5.0) -> None:
    """Kill what is left of a session and wait until it is gone."""
    until = time.monotonic() + patience
    while (left := session_processes(session)) and time.monotonic() < until:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def _remove_stale() -> None:
    for path in (*Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"), *_SHARED_MEMORY.glob(f"{_PREFIX}*")):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not owner.isdecimal() or Path("/proc", owner).exists():
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
