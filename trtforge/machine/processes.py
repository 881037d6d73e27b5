"""Child processes that end with this one, as do their descendants: signals, Linux's sessions and /proc."""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # looked up here: after a fork only async-signal-safe calls are allowed
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
SIGHUP_STATUS, SIGINT_STATUS, SIGTERM_STATUS = 128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit statuses of a program that a signal ended, as shells give them."""


@dataclass(frozen=True)
class ProcessStat:
    """One line of /proc/PID/stat. `state`: R, S, D, T (stopped), Z (zombie), ...; `started`: clock ticks since boot.

    Process id and `started` together identify a process: ids are reused.
    """

    state: str
    session: int
    started: int
    cpu_seconds: float

    @property
    def ended(self) -> bool:
        """Whether it is a zombie or being removed."""
        return self.state in "ZX"


def stat_of(process: int) -> ProcessStat | None:
    """The state of a process from /proc; None if it does not exist."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    cpu_ticks = int(fields[11]) + int(fields[12])
    return ProcessStat(fields[0], int(fields[3]), int(fields[19]), cpu_ticks / _CLOCK_TICKS)


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process uniquely on this machine, also across reused process ids and restarts of the machine.

    `boot`: the kernel's identifier of the time since the machine was started.
    """

    pid: int
    started: int
    boot: str

    def is_here(self) -> bool:
        """Whether the process runs on this machine and in this process id namespace (container)."""
        stat = stat_of(self.pid)
        return stat is not None and not stat.ended and stat.started == self.started and boot_of_machine() == self.boot


def identity_of(process: int) -> ProcessIdentity | None:
    """The identity of a process, also of one that has ended and was not waited for; None if there is none."""
    stat = stat_of(process)
    return None if stat is None else ProcessIdentity(process, stat.started, boot_of_machine())


def boot_of_machine() -> str:
    """The kernel's identifier of the time since the machine was started; empty if it tells none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def handles_signal(process: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, as /proc/PID/status says; False if it does not exist."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def raise_open_file_limit() -> int:
    """Raise the limit of open files of this process and its children to the hard limit.

    Returns the limit; `sys.maxsize` without one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def end_with_parent() -> None:
    """Run in a child before exec: the child gets SIGTERM when the parent ends for any reason."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def outlive_parent() -> None:
    """Undo `end_with_parent`, in the main thread: the kernel keeps the signal for each thread."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, 0)


@contextmanager
def handled(numbers: Iterable[int], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """These signals call `handle` within the block. Main thread only: Python sets and runs handlers nowhere else."""
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def session_processes(session: int) -> dict[int, str]:
    """Process id to program name of every process in a session (its leader and all descendants in it)."""
    return {process: Path(words[0]).name for process, words in session_commands(session).items()}


def session_commands(session: int) -> dict[int, tuple[str, ...]]:
    """Process id to command line of every process in a session."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and lives_in(session, int(entry.name)):
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                found[int(entry.name)] = tuple(word.decode(errors="replace") for word in words)
    return found


def lives_in(session: int, process: int) -> bool:
    """Whether a process exists, has not ended and belongs to the session."""
    stat = stat_of(process)
    return stat is not None and not stat.ended and stat.session == session


def kill_session(session: int) -> bool:
    """Send SIGKILL to every process in a session; True if there was any."""
    left = session_processes(session)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return bool(left)


def end_session(session: int, patience: float = 5.0) -> None:
    """Kill what is left of a session and wait until it is gone."""
    until = time.monotonic() + patience
    while kill_session(session) and time.monotonic() < until:
        time.sleep(0.02)
