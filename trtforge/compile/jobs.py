"""Run programs in parallel, each with its own log; the first failure ends the others, and all end with trtforge."""

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
from trtforge.machine.interruptions import heeded, leave_lost_terminal
from trtforge.machine.processes import end_session, end_with_parent, handled

_POLL = 0.05
_GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL."""

_CLEANUP_TIMEOUT = 30.0
"""Time limit of a job's cleanup in seconds, in case the docker daemon hangs."""

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(frozen=True)
class Job:
    """`run`, started in `directory`, with its output in `log`. `name` is used in messages."""

    name: str
    run: Run
    directory: Path
    log: Path


AnyJob = TypeVar("AnyJob", bound=Job)


class Observer(Generic[AnyJob]):
    """Callbacks for the life of a job; the base class ignores them."""

    def begin(self, job: AnyJob) -> None:
        """The job is about to start; the observer may create its directory."""

    def look(self, job: AnyJob) -> None:
        """The job is running; called several times per second."""

    def finished(self, job: AnyJob) -> None:
        """The job succeeded."""


def run_jobs(lanes: Sequence[Sequence[AnyJob]], observer: Observer[AnyJob]) -> None:
    """Run all lanes in parallel, and the jobs of a lane one after the other.

    A failing job, an error of the observer, an interruption or SIGTERM ends all jobs. Raises LoggedError for the first
    job that fails.
    """
    waiting = [deque(lane) for lane in lanes]
    running: dict[int, _Running[AnyJob]] = {}
    with _deferred_signals() as signals:
        try:
            while running or any(waiting):
                for lane, jobs in enumerate(waiting):
                    if lane not in running and jobs:
                        observer.begin(jobs[0])
                        running[lane] = _Running(jobs.popleft())
                for lane, process in list(running.items()):
                    observer.look(process.job)
                    status = process.poll()
                    signals.raise_if_any()  # before the job's failure, which may have the same cause
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
    signals.raise_if_any()


class _Running(Generic[AnyJob]):
    """A job's process, leader of its own session, so that signals of the terminal do not reach it."""

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
        """The exit status; None while the process runs."""
        return self._process.poll()

    def ask_to_end(self) -> None:
        """Send SIGTERM, which `docker run` forwards to its container."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)

    def end(self, patience: float) -> None:
        """Wait `patience` seconds, then kill the process and everything that it started."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        end_session(self._process.pid)
        if self._process.returncode != 0 and self.job.run.cleanup:
            with suppress(subprocess.TimeoutExpired, OSError):  # the job's own failure is reported
                subprocess.run(
                    self.job.run.cleanup,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    check=False,
                    timeout=_CLEANUP_TIMEOUT,
                )


def _end(running: Collection[_Running[AnyJob]]) -> None:
    """End all processes within one common grace period."""
    for process in running:
        process.ask_to_end()
    until = time.monotonic() + _GRACE
    for process in running:
        process.end(max(0.0, until - time.monotonic()))


def _failure(job: Job, status: int) -> LoggedError:
    """The error of a failed job. A killed program logs nothing itself, so a line is added to its log."""
    how = f"ended with status {status}" if status > 0 else f"was ended by signal {-status}"
    if status in _KILLED:
        with job.log.open("a") as log:
            log.write(f"{job.name} exited on signal 9 (Killed)\n")
    return LoggedError(
        f"{job.name} {how}", hint=f"Its output is in {job.log}; finished work is kept for the next run.", log=job.log
    )


class _DeferredSignals:
    """Records SIGINT, SIGTERM and SIGHUP until they are checked: an exception raised anywhere could get lost."""

    def __init__(self) -> None:
        self._number: int | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: record the signal."""
        if number == signal.SIGHUP:
            leave_lost_terminal()
        self._number = number

    def raise_if_any(self) -> None:
        """Raise KeyboardInterrupt after SIGINT and SystemExit after SIGTERM and SIGHUP."""
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._number is not None:
            sys.exit(128 + self._number)


@contextmanager
def _deferred_signals() -> Iterator[_DeferredSignals]:
    """Record SIGINT, SIGTERM and SIGHUP within the block, unless they are ignored."""
    signals = _DeferredSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    with handled(heeded((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)), signals.note):
        yield signals
