"""The processes of one server: the programs started here, and their model and engine processes."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trtforge.machine.processes import (
    ProcessStat,
    end_session,
    end_with_parent,
    kill_session,
    session_commands,
    stat_of,
)
from trtforge.serve.environment import UMASK
from trtforge.serve.installation import STUB

_POLL = 0.05


@dataclass(frozen=True)
class Member:
    """A process that the server needs. `started` distinguishes it from a later process with the same id."""

    name: str
    pid: int
    started: int

    def stat(self) -> ProcessStat | None:
        """Its current state in the kernel; None if it has ended."""
        stat = stat_of(self.pid)
        return None if stat is None or stat.ended or stat.started != self.started else stat


@dataclass(frozen=True)
class Lost:
    """An optional program that has ended. `log`: its own; None: our standard error."""

    name: str
    pid: int
    status: int
    log: Path | None


class Group:
    """Programs, each in its own session, and all processes of these sessions.

    `log`: file for their output; None: our standard error. The server continues without optional programs, each of
    which has its own log.
    """

    def __init__(self, log: Path | None) -> None:
        self._log = log
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._optional: dict[str, Path | None] = {}
        self._lost: set[str] = set()

    def start(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        optional: bool = False,
        directory: Path | None = None,
    ) -> None:
        """Start a program with this environment and directory; only its user can access the files that it creates."""
        log = self._log
        if optional:
            log = log.with_suffix(f".{len(self._programs)}.log") if log is not None else None
            self._optional[name] = log
        with _output(log) as output:
            self._programs[name] = subprocess.Popen(
                argv,
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
                umask=UMASK,
            )

    @property
    def sessions(self) -> tuple[int, ...]:
        """Process ids of the session leaders."""
        return tuple(program.pid for program in self._programs.values())

    def process(self, name: str) -> int:
        """Process id of a program."""
        return self._programs[name].pid

    def exit_status(self, pid: int) -> int | None:
        """The exit status of a program that has ended; None for a running one and for other processes."""
        return next((program.poll() for program in self._programs.values() if program.pid == pid), None)

    def ended(self) -> tuple[str, int] | None:
        """The first required program that has ended, with its exit status; None while all run."""
        for name, program in self._programs.items():
            status = program.poll()
            if status is not None and name not in self._optional:
                return name, status
        return None

    def lost(self) -> Lost | None:
        """An optional program that has ended and was not returned before; None if there is none."""
        for name, log in self._optional.items():
            status = self._programs[name].poll()
            if status is not None and name not in self._lost:
                self._lost.add(name)
                return Lost(name, self._programs[name].pid, status, log)
        return None

    def members(self, others: Mapping[int, str]) -> tuple[Member, ...]:
        """The required programs, Triton's model processes, and `others` (process id to name) that exist."""
        names = {program.pid: name for name, program in self._programs.items() if name not in self._optional}
        names |= self.model_processes()
        return tuple(
            Member(name, pid, stat.started)
            for pid, name in (names | dict(others)).items()
            if (stat := stat_of(pid)) is not None
        )

    def model_processes(self) -> dict[int, str]:
        """Process id to a name for each process in which Triton runs a Python model."""
        return {
            pid: f"the process of model {_model_of(words)}"
            for session in self.sessions
            for pid, words in session_commands(session).items()
            if Path(words[0]).name == STUB
        }

    def terminate(self, patience: float) -> list[str]:
        """Send SIGTERM to each program, last started first, and wait `patience` seconds for each.

        Returns the names of the programs that did not end.
        """
        left = []
        for name, program in reversed(self._programs.items()):
            if program.poll() is None:
                program.send_signal(signal.SIGTERM)
            if not _wait(program, patience):
                left.append(name)
        return left

    def kill_program(self, name: str) -> None:
        """Send SIGKILL to a program and all processes of its session, without waiting."""
        kill_session(self._programs[name].pid)

    def kill(self) -> None:
        """Send SIGKILL to all processes, without waiting. Safe in a signal handler."""
        for session in self.sessions:
            kill_session(session)

    def end(self) -> None:
        """Kill all processes and wait for the programs."""
        for program in self._programs.values():
            end_session(program.pid)
            program.kill()
            program.wait()


def _wait(program: "subprocess.Popen[bytes]", patience: float) -> bool:
    """Wait like `Popen.wait`, but notice soon if one of our signal handlers has killed the program."""
    until = time.monotonic() + patience
    while program.poll() is None:
        if time.monotonic() > until:
            return False
        time.sleep(_POLL)
    return True


def _model_of(words: Sequence[str]) -> str:
    """The model's name in a stub's command line, whose first argument is REPOSITORY/MODEL/VERSION/model.py."""
    parts = Path(words[1]).parts if len(words) > 1 else ()
    return parts[-3] if len(parts) > 2 else "?"


@contextmanager
def _output(log: Path | None) -> Iterator[IO[bytes]]:
    if log is None:
        yield sys.stderr.buffer
        return
    with log.open("ab") as file:
        yield file
