"""One run of a server: start, wait until ready, watch, drain, and end all its processes."""

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.engine_process.control import EngineControl, EngineStatus
from trtforge.machine.proc import listens
from trtforge.machine.processes import raise_open_file_limit
from trtforge.serve.deaths import DeathOrder
from trtforge.serve.environment import server_environment
from trtforge.serve.group import Group, Member
from trtforge.serve.launchers import Launch
from trtforge.serve.observers import EngineObserver, HealthObserver, PathCheck, engine_of, within
from trtforge.serve.reap import Remains
from trtforge.serve.reaper import Reaper
from trtforge.serve.restart import ServerFailed
from trtforge.serve.server_log import LogMark, first_error, last_lines, without_hint
from trtforge.serve.shutdown import Toll, drain
from trtforge.serve.stacks import dump_stacks
from trtforge.serve.stopping import StopRequest
from trtforge.serve.watchdog import IdleClock, ProcessSample, ProcessState, Sample, Verdict, Watchdog

_LOG = logging.getLogger(__name__)
_POLL = 0.1
_PAUSED = 2.0  # a longer interval in seconds between two checks means that this process was stopped
_PATIENCE = 5.0  # seconds for a server without unfinished requests to end; it takes over 3 on a busy machine
_DELIVERY = 0.7  # seconds for errors in flight to clients
_REASON = 3.0  # seconds until the log says why the engine process died; it takes over 0.7 on a busy machine
_SIGNALLED = 128
_GATEWAY, _TRITON = "the OpenAI gateway", "the Triton server"
_LOADING_RACE = "boost::interprocess::lock_exception"
"""Error with which Triton's Python backend aborts while loading models, once in some hundred starts (Triton server
#8882)."""


@dataclass(frozen=True)
class Service:
    """How to reach a server. `http`: Triton's own endpoint, HOST:PORT or unix:PATH; never a front, so that its clients
    cannot make the server look wedged. `model`: a text model; `engine`: the engine model behind it. `log`: the server's
    log; None: our standard error.
    """

    runtime: Path
    http: str
    model: str
    engine: str
    log: Path | None


@dataclass(frozen=True)
class Ending:
    """The end of a server that was asked to stop: its exit status, and a line about the outcome of its requests."""

    status: int
    line: str


class Server:
    """A running server. `gateway_lost`: set if the gateway has ended and the server continues without it."""

    def __init__(self, launch: Launch, service: Service, stop: StopRequest, reaper: Reaper) -> None:
        self._launch, self._service, self._stop, self._reaper = launch, service, stop, reaper
        self._group = Group(service.log)
        self._control: EngineControl | None = None
        self._observer: EngineObserver | None = None
        self._members: tuple[Member, ...] = ()
        self._ranks: tuple[int, ...] = ()
        self._deaths: DeathOrder | None = None
        self._mark = LogMark(service.log)
        self._was_ready = False
        self.gateway_lost = threading.Event()
        stop.kills(self._group.kill)
        raise_open_file_limit()
        if launch.front is not None:
            self._group.start("the HTTP front", launch.front.argv, server_environment({}))
        if launch.gateway is not None:
            optional = not launch.gateway.required
            self._group.start(_GATEWAY, launch.gateway.argv, server_environment({}), optional=optional)
        # In the current directory, which may be anybody's, its Python backend would find modules.
        own = launch.view.parent if launch.launcher == "local" and launch.view is not None else None
        self._group.start(_TRITON, launch.argv, launch.process_environment(), directory=own)
        commands = (launch.cleanup,) if launch.cleanup else ()
        self._remains = Remains(self._group.sessions, (str(service.runtime),), commands)
        reaper.tell(self._remains)

    def wait_ready(self, is_ready: Callable[[float], bool], timeout: float) -> bool:
        """True once `is_ready(seconds_left)` is true; False if a stop is requested before.

        Raises ServerFailed if the server ends, takes too long, or `is_ready` raises ForgeError.
        """
        until = time.monotonic() + timeout
        while not self._stop.wait(_POLL):
            self._require_running()
            self._warn_of_lost()
            self._reaper.keep()
            try:
                if is_ready(max(1.0, until - time.monotonic())):
                    return self._begin()
            except ForgeError as error:
                if self._stop.asked:
                    return False
                self._require_running()
                raise ServerFailed(error.message, hint=error.hint, was_ready=False) from None
            if time.monotonic() > until:
                raise self._failure(f"was not ready after {timeout:.0f} s", "Raise --ready-timeout.")
        return False

    def gateway_listens(self, port: int) -> bool:
        """Whether the gateway accepts connections on its port."""
        return listens(self._group.process(_GATEWAY), port)

    def watch(self) -> None:
        """Return when a stop is requested. If the server breaks, end it and raise ServerFailed."""
        last = time.monotonic()  # before anything measures silence: this process may be stopped from here on
        if self._observer is not None:
            self._observer.restart()
        watchdog, idle = Watchdog(), IdleClock()
        health = HealthObserver(self._service.http)
        path = PathCheck(self._service.http, self._service.model)
        try:
            while not self._stop.wait(_POLL):
                now = time.monotonic()
                if now - last > _PAUSED:
                    # This process itself was stopped, so nothing was queried since then.
                    watchdog, path = Watchdog(), PathCheck(self._service.http, self._service.model)
                    health.restart()
                    if self._observer is not None:
                        self._observer.restart()
                last = now
                status, silent = self._engine(now)
                if idle.due(now, status):
                    path.start()
                sample = Sample(now, self._processes(), status, silent, health.silent_seconds(now), path.error)
                verdict = watchdog.judge(sample)
                if verdict is not None:
                    raise self._broken(verdict)
                self._warn_of_lost()
                self._mark.advance(now)
                self._reaper.keep()
        finally:
            health.end()

    def shut_down(self, drain_timeout: float) -> Ending:
        """Drain and end the server; exit status 0, 1 if requests were cut, 128 + the number of a second signal."""
        if self._control is None:
            return self._shut_down_triton(drain_timeout)
        status, _ = self._engine(time.monotonic())
        toll = drain(self._control, drain_timeout, self._why_hurry, last=status)
        left = [] if self._stop.again is not None else self._group.terminate(_PATIENCE)
        if left and self._stop.again is None:
            _say(f"{' and '.join(left)} did not end within {_PATIENCE:.0f} s, and will be killed")
        if self._stop.again is not None:
            return self._stopped_at_once(toll)
        return Ending(1 if toll.cut else 0, toll.describe())

    def end(self) -> None:
        """End all processes and clean up."""
        self._stop.kills(None)
        if self._observer is not None:
            self._observer.end()
        if self._deaths is not None:
            self._deaths.close()
        self._group.end()
        self._remains.run_commands()
        self._reaper.tell(Remains())

    def _begin(self) -> bool:
        """Record the processes of the ready server. False if a stop is requested."""
        self._control = engine_of(self._service.runtime, self._service.engine)
        others: dict[int, str] = {}
        if self._control is not None:
            try:
                status = self._control.status()
            except OSError as error:
                raise self._failure(f"lost its engine process: {error}", "See the whole log with --verbose.") from None
            self._ranks = status.worker_pids
            others = {pid: f"rank {rank} of the engine" for rank, pid in enumerate(self._ranks, start=1)}
            others[status.pid] = "the engine process"
            self._observer = EngineObserver(self._control, status)
        self._members = self._group.members(others)
        self._deaths = DeathOrder(member.pid for member in self._members)
        self._was_ready = True
        self._stop.allow_draining()
        return not self._stop.asked

    def _engine(self, now: float) -> tuple[EngineStatus | None, float]:
        if self._observer is None:
            return None, 0.0
        status, answered_at = self._observer.answer
        return status, now - answered_at

    def _processes(self) -> tuple[ProcessSample, ...]:
        """The processes, ended ones in the order of their ends. If one has ended, all are read again, as the first to
        end may have been read before its end."""
        samples = self._read_processes()
        if any(sample.state == "ended" for sample in samples):
            samples = self._read_processes()
        deaths = self._deaths
        return tuple(samples if deaths is None else sorted(samples, key=lambda sample: deaths.place(sample.pid)))

    def _read_processes(self) -> list[ProcessSample]:
        samples = []
        for member in self._members:
            stat = member.stat()
            if stat is None:
                samples.append(
                    ProcessSample(member.name, member.pid, "ended", exit_status=self._group.exit_status(member.pid))
                )
            else:
                state: ProcessState = "stopped" if stat.state == "T" else "running"
                samples.append(ProcessSample(member.name, member.pid, state, stat.cpu_seconds))
        return samples

    def _why_hurry(self) -> str:
        """Why draining must stop waiting; empty if it may continue."""
        if self._stop.again is not None:
            return "the server was stopped at once"
        return next((f"{member.name} ended" for member in self._members if member.stat() is None), "")

    def _shut_down_triton(self, drain_timeout: float) -> Ending:
        """Let Triton drain, because only Triton can count its requests."""
        left = self._group.terminate(max(_PATIENCE, drain_timeout))
        if self._stop.again is not None:
            return self._stopped_at_once(None)
        if not left:
            return Ending(0, "stopped")
        return Ending(1, f"stopped: requests that still ran after {drain_timeout:g} s were cut")

    def _stopped_at_once(self, toll: Toll | None) -> Ending:
        assert self._stop.again is not None
        cut = f": {toll.cut} requests cut" if toll is not None else ""
        name = signal.Signals(self._stop.again).name
        return Ending(_SIGNALLED + self._stop.again, f"stopped at once by a second {name}{cut}")

    def _broken(self, verdict: Verdict) -> ServerFailed:
        """Show the stacks of hanging processes, end the requests with an error, and kill everything."""
        if verdict.kind in ("frozen", "wedged"):
            _say(f"{verdict.reason}; stacks of its model and engine processes follow")
            stacks = dump_stacks([*self._group.model_processes(), *self._engine_pid()], self._service.log)
            if stacks:
                _say(stacks.rstrip())
        error, hint = self._first_error(verdict)
        if self._control is not None and verdict.kind != "failed":
            control = self._control
            within(_DELIVERY, lambda: control.cut(f"the server is ending: {error or verdict.reason}"))
        time.sleep(_DELIVERY)
        self._group.kill_program(_TRITON)
        if self._launch.front is not None or self._launch.gateway is not None:
            time.sleep(_DELIVERY)  # they send errors to clients whose requests had not reached the engine
        self._group.kill()
        said = f":\n{error}" if error else ""
        return ServerFailed(f"{verdict.reason}{said}", hint=hint or "Start it again.", was_ready=self._was_ready)

    def _first_error(self, verdict: Verdict) -> tuple[str, str]:
        """Error and hint of the engine; if a process died without one, the first new error in the log."""
        until = time.monotonic() + (_REASON if verdict.pid in self._engine_pid() else _DELIVERY)
        while verdict.pid in self._ranks and self._observer is not None and time.monotonic() < until:
            status, _ = self._observer.answer
            if status.error:
                return status.error, status.hint
            time.sleep(_POLL)
        if verdict.error or verdict.kind != "died":
            return verdict.error, verdict.hint
        error = first_error(self._service.log, self._mark.offset)
        while not error and time.monotonic() < until:  # it may not be in the log yet
            time.sleep(_POLL)
            error = first_error(self._service.log, self._mark.offset)
        return without_hint(error)

    def _engine_pid(self) -> tuple[int, ...]:
        return (self._observer.answer[0].pid,) if self._observer is not None else ()

    def _require_running(self) -> None:
        """Raise ServerFailed if a required program ended while the server starts."""
        ended = self._group.ended()
        if ended is not None and not self._stop.asked:
            raise self._failure(
                f"ended while starting with status {ended[1]}", "See the whole log with --verbose.", ended[0]
            )

    def _warn_of_lost(self) -> None:
        """Warn once per optional program that has ended, with the reason."""
        lost = None if self._stop.asked else self._group.lost()
        if lost is None:
            return
        self.gateway_lost.set()
        error = first_error(lost.log) or last_lines(lost.log)
        said = f": {'; '.join(error.splitlines())}" if error else ""
        _LOG.warning(
            f"{lost.name} (process {lost.pid}) ended with status {lost.status}{said}; the server goes on without "
            "OpenAI's API"
        )

    def _failure(self, what: str, hint: str, who: str = _TRITON) -> ServerFailed:
        """The failure with the log's first error and its hint, else `hint`."""
        log, offset = self._service.log, self._mark.offset
        error, own = without_hint(first_error(log, offset) or last_lines(log, offset))
        return ServerFailed(
            f"{who} {what}" + (f":\n{error}" if error else ""),
            hint=own or hint,
            was_ready=self._was_ready,
            by_chance=not self._was_ready and _LOADING_RACE in error,
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
