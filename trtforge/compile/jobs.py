"""Programs that run side by side: each has its own log, the first failure ends the others, and none outlives us."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

from trtforge.compile.build_site import Run
from trtforge.core.errors import LoggedError
from trtforge.machine.processes import SIGTERM_STATUS, end_session, end_with_parent, handled

_POLL = 0.05
_GRACE = 10.0
"""Seconds that a program gets to end by itself after SIGTERM."""

_CLEANUP_TIMEOUT = 30.0
"""Seconds that a job's cleanup gets: a docker daemon that hangs must not keep us."""

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(frozen=True)
class Job:
    """`run`, started in `directory`; all its output goes to `log`. `name` is what messages call it."""

    name: str
    run: Run
    directory: Path
    log: Path


AnyJob = TypeVar("AnyJob", bound=Job)


class Observer(Generic[AnyJob]):
    """Is told of each job; this one does nothing about it."""

    def begin(self, job: AnyJob) -> None:
        """The job is about to start; its directory may be made now."""

    def look(self, job: AnyJob) -> None:
        """The job runs: called several times a second."""

    def finished(self, job: AnyJob) -> None:
        """The job succeeded."""


def run_jobs(lanes: Sequence[Sequence[AnyJob]], observer: Observer[AnyJob]) -> None:
    """Work on all lanes at once, on the jobs of a lane one after the other.

    Whatever ends this early (a job that fails, an error of the observer, an interruption, SIGTERM) ends all jobs.
    Raises LoggedError for the first job that fails.
    """
    waiting = [deque(lane) for lane in lanes]
    running: dict[int, _Running[AnyJob]] = {}
    with _asked_to_end() as asked:
        try:
            while running or any(waiting):
                for lane, jobs in enumerate(waiting):
                    if lane not in running and jobs:
                        observer.begin(jobs[0])
                        running[lane] = _Running(jobs.popleft())
                for lane, process in list(running.items()):
                    observer.look(process.job)
                    status = process.poll()
                    asked.obey()  # before its failure is told, which may be of the same signal
                    if status is None:
                        continue
                    process.end(_GRACE)
                    del running[lane]
                    if status != 0:
                        raise _failure(process.job, status)
                    observer.finished(process.job)
                time.sleep(_POLL)
        finally:
            _end(running.values())
    asked.obey()


class _Running(Generic[AnyJob]):
    """A job's process, leader of a session of its own: a signal to our terminal does not reach it."""

    def __init__(self, job: AnyJob) -> None:
        self.job = job
        with job.log.open("wb") as log:
            self._process = subprocess.Popen(
                job.run.argv,
                cwd=job.directory,
                env={**os.environ, **job.run.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def ask_to_end(self) -> None:
        """SIGTERM, which `docker run` passes on to its container."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)

    def end(self, patience: float) -> None:
        """Wait `patience` seconds, then kill; nothing that it started is left."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        end_session(self._process.pid)
        if self._process.returncode != 0 and self.job.run.cleanup:
            with suppress(subprocess.TimeoutExpired, OSError):  # the job's own failure is what is told
                subprocess.run(
                    self.job.run.cleanup,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    check=False,
                    timeout=_CLEANUP_TIMEOUT,
                )


def _end(running: Collection[_Running[AnyJob]]) -> None:
    """End all at once, not one after the other's grace."""
    for process in running:
        process.ask_to_end()
    until = time.monotonic() + _GRACE
    for process in running:
        process.end(max(0.0, until - time.monotonic()))


def _failure(job: Job, status: int) -> LoggedError:
    """What to say of a job that failed. A killed program says nothing itself, so its log is told."""
    how = f"ended with status {status}" if status > 0 else f"was ended by signal {-status}"
    if status in _KILLED:
        with job.log.open("a") as log:
            log.write(f"{job.name} exited on signal 9 (Killed)\n")
    return LoggedError(
        f"{job.name} {how}", hint=f"Its output is in {job.log}; what is finished is kept for the next run.", log=job.log
    )


class _Asked:
    """A signal that asks us to end is noted, and obeyed where we look: raised anywhere, it could get lost."""

    def __init__(self) -> None:
        self._number: int | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self._number = number

    def obey(self) -> None:
        """Raise KeyboardInterrupt after SIGINT and SystemExit after SIGTERM."""
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._number is not None:
            sys.exit(SIGTERM_STATUS)


@contextmanager
def _asked_to_end() -> Iterator[_Asked]:
    """SIGINT and SIGTERM are noted while this lasts, unless they are ignored."""
    asked = _Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    with handled(numbers, asked.note):
        yield asked
