"""Diagnoses a server from samples of its processes and engine; taking samples and acting are left to others.

A process that uses the CPU gets more time than an idle one: on a loaded machine it is slow, in a deadlock idle.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trtforge.engine_process.control import EngineStatus

Kind = Literal["died", "frozen", "failed", "wedged"]
ProcessState = Literal["running", "stopped", "ended"]


@dataclass(frozen=True)
class WatchdogLimits:
    """Seconds until something counts as broken."""

    stopped: float = 2.0
    silent: float = 5.0
    silent_computing: float = 30.0
    unanswered: float = 10.0
    stalled: float = 10.0
    health: float = 10.0
    computing: float = 0.2
    """Share of one core above which a process counts as computing, not idle."""
    late: float = 1.0
    """Interval between two samples above which the machine is so loaded that a process may be waiting for CPU time."""


@dataclass(frozen=True)
class ProcessSample:
    """State of a process. `exit_status`: of an ended process, if known."""

    name: str
    pid: int
    state: ProcessState
    cpu_seconds: float = 0.0
    exit_status: int | None = None


@dataclass(frozen=True)
class Sample:
    """State of a server. `processes`: ended ones first, in the order of their ends. `engine`: its last answer.

    `engine_silent`: seconds since that answer (0 without an engine process). `health_silent`: seconds since Triton's
    health endpoint last answered. `path_error`: why the test request to the idle server failed; empty if it succeeded
    or none was sent.
    """

    time: float
    processes: tuple[ProcessSample, ...]
    engine: EngineStatus | None = None
    engine_silent: float = 0.0
    health_silent: float = 0.0
    path_error: str = ""


@dataclass(frozen=True)
class Verdict:
    """A diagnosed problem. `error` and `hint`: as reported by the engine, else empty. `pid`: the process at fault."""

    kind: Kind
    reason: str
    error: str = ""
    hint: str = ""
    pid: int | None = None


class Watchdog:
    """Judges successive samples."""

    def __init__(self, limits: WatchdogLimits = WatchdogLimits()) -> None:
        self._limits = limits
        self._stopped_since: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}
        self._last: dict[int, tuple[float, float]] = {}
        self._sampled, self._late_at = math.inf, -math.inf

    def judge(self, sample: Sample) -> Verdict | None:
        """The most serious problem; None if there is none. The engine's own error comes before its consequences."""
        self._remember(sample)
        return next(
            (
                verdict
                for judge in (_engine_failed, _ended, self._stopped, self._silent, self._wedged)
                for verdict in judge(sample)
            ),
            None,
        )

    def _remember(self, sample: Sample) -> None:
        """Record since when each process has been stopped or idle, and when this process itself was late."""
        if sample.time - self._sampled > self._limits.late:
            self._late_at = sample.time
        self._sampled = sample.time
        for process in sample.processes:
            if process.state == "stopped":
                self._stopped_since.setdefault(process.pid, sample.time)
            else:
                self._stopped_since.pop(process.pid, None)
            before, cpu = self._last.get(process.pid, (sample.time, process.cpu_seconds))
            elapsed = sample.time - before
            if elapsed >= 1.0 or process.pid not in self._last:
                self._last[process.pid] = (sample.time, process.cpu_seconds)
                if elapsed and process.cpu_seconds - cpu > self._limits.computing * elapsed:
                    self._idle_since.pop(process.pid, None)
                else:
                    self._idle_since.setdefault(process.pid, before)

    def _stopped(self, sample: Sample) -> Iterator[Verdict]:
        for process in sample.processes:
            since = self._stopped_since.get(process.pid, sample.time)
            if sample.time - since > self._limits.stopped:
                yield Verdict("frozen", f"{process.name} (process {process.pid}) is stopped", pid=process.pid)

    def _silent(self, sample: Sample) -> Iterator[Verdict]:
        """Verdicts if the engine process does not answer or a model process sends no heartbeats."""
        engine = sample.engine
        if engine is None:
            return
        if self._too_silent(sample, engine.pid, sample.engine_silent):
            yield Verdict(
                "frozen",
                f"the engine process ({engine.pid}) has not answered for {sample.engine_silent:.0f} s",
                pid=engine.pid,
            )
        for client in engine.clients:
            # The engine's report on its clients is as old as its last answer.
            if sample.engine_silent < self._limits.stopped and self._too_silent(
                sample, client.pid, client.silent_seconds
            ):
                yield Verdict(
                    "frozen",
                    f"the process of model {client.name} ({client.pid}) has sent nothing for "
                    f"{client.silent_seconds:.0f} s",
                    pid=client.pid,
                )

    def _too_silent(self, sample: Sample, pid: int, silent: float) -> bool:
        """Whether a process is silent for too long. Without samples it counts as idle, unless the machine is too
        loaded."""
        if self._too_loaded(sample):
            return silent > self._limits.silent_computing
        idle = sample.time - self._idle_since.get(pid, sample.time) if pid in self._last else silent
        return min(silent, idle) > self._limits.silent or silent > self._limits.silent_computing

    def _too_loaded(self, sample: Sample) -> bool:
        """Whether this process itself was late recently."""
        return sample.time - self._late_at < self._limits.unanswered

    def _wedged(self, sample: Sample) -> Iterator[Verdict]:
        limits, engine = self._limits, sample.engine
        if engine is not None and engine.running + engine.waiting > 0 and engine.stalled_seconds > limits.stalled:
            yield Verdict(
                "wedged",
                f"no token was generated for {engine.stalled_seconds:.0f} s while {engine.running} requests run and "
                f"{engine.waiting} wait",
            )
        for client in engine.clients if engine is not None else ():
            most = limits.silent_computing if self._too_loaded(sample) else limits.unanswered
            if client.unanswered > 0 and client.silent_seconds > most:
                yield Verdict(
                    "wedged",
                    f"the process of model {client.name} ({client.pid}) has {client.unanswered} requests unanswered "
                    f"and has sent nothing for {client.silent_seconds:.0f} s",
                    pid=client.pid,
                )
        if sample.health_silent > limits.health:
            yield Verdict(
                "wedged", f"the Triton server's health endpoint has not answered for {sample.health_silent:.0f} s"
            )
        if sample.path_error:
            yield Verdict("wedged", f"the idle server did not answer a request: {sample.path_error}")


def _engine_failed(sample: Sample) -> Iterator[Verdict]:
    if sample.engine is not None and sample.engine.state == "failed":
        yield Verdict("failed", "the engine failed", sample.engine.error, sample.engine.hint, sample.engine.pid)


def _ended(sample: Sample) -> Iterator[Verdict]:
    for process in sample.processes:
        if process.state == "ended":
            status = "" if process.exit_status is None else f" with status {process.exit_status}"
            yield Verdict("died", f"{process.name} (process {process.pid}) ended{status}", pid=process.pid)


class IdleClock:
    """Decides when an idle server needs a test request."""

    def __init__(self, period: float = 30.0) -> None:
        self._period = period
        self._counters: tuple[int, int] | None = None
        self._quiet_since = 0.0

    def due(self, now: float, engine: EngineStatus | None) -> bool:
        """True once per period in which nothing has run."""
        if engine is None:
            return False
        counters = (engine.generated_tokens, engine.finished + engine.refused)
        busy = engine.running + engine.waiting > 0 or any(client.unanswered for client in engine.clients)
        if busy or counters != self._counters:
            self._counters, self._quiet_since = counters, now
        if now - self._quiet_since < self._period:
            return False
        self._quiet_since = now
        return True
