"""Every process of a server killed or stopped, idle and busy: clients hear of it, the rest ends, nothing is left."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.assault.client import Answer, Progress, ask, stubs
from tests.assault.messages import PROMPTS, text_request
from tests.assault.report import Report
from tests.assault.server import AssaultError, Server, serving
from tests.assault.works import broken_models

_STREAMS = 16
_TOKENS = 1000
_OF_THE_ENGINE = ("stub tensorrt_llm", "engine", "rank", "worker", "spawn")
"""Parts of the names of processes whose end Triton survives for long enough to tell its clients."""


@dataclass(frozen=True)
class Options:
    """`times`: how often each case is run; `hear_kill` and `hear_stop`: seconds until clients must have heard."""

    times: int = 10
    hear_kill: float = 2.0
    hear_stop: float = 10.0
    roles: str = ""
    """Only processes whose name contains it."""
    signals: Sequence[signal.Signals] = (signal.SIGKILL, signal.SIGSTOP)
    loads: Sequence[bool] = (False, True)


@dataclass(frozen=True)
class Seen:
    """What happened after a signal. `heard`: seconds until no client was left waiting; None: somebody still is."""

    heard: float | None
    answers: tuple[Answer, ...]
    status: int | None
    errors: tuple[str, ...]
    ended: float | None
    broken: tuple[str, ...]
    left: tuple[str, ...]


def run(repository: Path, name: str, options: Options) -> Report:
    """Each process of a fresh server in turn. The processes are those that a first server has."""
    report = Report(f"kills, {name}")
    with serving(repository) as server:
        asyncio.run(broken_models(server.grpc))
        roles = [process.name for process in server.tree.sample().values()]
    chosen = [role for role in roles if options.roles in role]
    report.notes.append(f"processes: {', '.join(roles)}")
    for role in chosen:
        for number in options.signals:
            for busy in options.loads:
                seen = [one(repository, role, number, busy, options) for _ in range(options.times)]
                what = f"{number.name} of {role}, {'busy' if busy else 'idle'}"
                judge(report, what, role, number, seen, options)
    return report


def judge(
    report: Report, what: str, role: str, number: signal.Signals, seen: Sequence[Seen | str], options: Options
) -> None:
    """Add what was seen of one case."""
    limit = options.hear_kill if number == signal.SIGKILL else options.hear_stop
    failed = [each for each in seen if isinstance(each, str)]
    whole = [each for each in seen if isinstance(each, Seen)]
    heard = [each.heard for each in whole if each.heard is not None]
    report.rows.append(
        {
            "case": what,
            "runs": len(seen),
            "heard after": max(heard, default=-1.0),
            "ended after": max((each.ended for each in whole if each.ended is not None), default=-1.0),
            "statuses": " ".join(sorted({str(each.status) for each in whole})),
            "left": sum(len(each.left) for each in whole),
        }
    )
    report.check(f"{what}: the server starts", not failed, failed[:1])
    late = [each.heard for each in whole if each.heard is None or each.heard > limit]
    report.check(f"{what}: clients hear within {limit:.0f} s", not late, f"{late} of {len(whole)} runs")
    ours = role_is_launcher(role)
    expected = {-signal.SIGKILL, 1} if ours and number == signal.SIGKILL else {0} if ours else {1}
    # A server that lives on must do its whole job and end well when it is told to.
    status = [each.status for each in whole if each.status not in (expected | ({0} if not each.broken else set()))]
    report.check(f"{what}: exit status", not status, f"{status}, expected {sorted(expected)}")
    silent = [each.errors[-3:] for each in whole if each.status == 1 and not has_error(each.errors)]
    report.check(f"{what}: a first error is shown", not silent, silent[:1])
    if any(word in role for word in _OF_THE_ENGINE) and number == signal.SIGKILL:
        untold = [answer.error for each in whole for answer in each.answers if answer.kind == "lost"]
        report.check(f"{what}: clients get the server's error", not untold, untold[:1])
    broken = [each.broken for each in whole if each.broken]
    report.check(f"{what}: a server that lives on works", not broken, broken[:1])
    left = [each.left for each in whole if each.left]
    report.check(f"{what}: nothing is left", not left, left[:1])


def has_error(lines: Sequence[str]) -> bool:
    """Whether an `error:` line says something."""
    return any(line.startswith("error:") and len(line) > len("error: ") for line in lines)


def role_is_launcher(role: str) -> bool:
    """Whether it is the process that the user started."""
    return role == "trtforge serve"


def one(repository: Path, role: str, number: signal.Signals, busy: bool, options: Options) -> Seen | str:
    """One server, one signal; a text if that could not be tried."""
    try:
        with serving(repository) as server:
            asyncio.run(broken_models(server.grpc))
            pids = [process.pid for process in server.tree.sample().values() if process.name == role]
            if not pids:
                return f"no process is called {role}"
            return asyncio.run(_strike(server, pids[0], number, busy, options))
    except AssaultError as error:
        return str(error)


async def _strike(server: Server, pid: int, number: signal.Signals, busy: bool, options: Options) -> Seen:
    limit = options.hear_kill if number == signal.SIGKILL else options.hear_stop
    progress = [Progress() for _ in range(_STREAMS if busy else 1)]
    async with stubs(server.grpc, 1) as (stub,):

        def open_stream(number: int) -> asyncio.Task[Answer]:
            request = text_request(PROMPTS[number % len(PROMPTS)], _TOKENS if busy else 4)
            return asyncio.create_task(ask(stub, request, within=300, progress=progress[number]))

        asked = [open_stream(number) for number in range(len(progress))] if busy else []
        until = time.monotonic() + 30
        while busy and not all(each.responses for each in progress) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        server.tree.sample()
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        start = time.monotonic()
        if not busy:
            asked = [open_stream(0)]
        heard = await _nobody_waits(asked, progress, start, limit + 5)
        answers = tuple(task.result() if task.done() else Answer("silent") for task in asked)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    # A server that does not live on needs a moment to end.
    end = await asyncio.to_thread(server.wait_end, max(0.0, start + limit + 5 - time.monotonic()))
    ended = time.monotonic() - start if end.status is not None else None
    broken: list[str] = []
    if end.status is None:
        if not role_is_launcher(server.tree.known.get(_identity(server, pid), "")):
            broken = await broken_models(server.grpc, 5)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        end = await asyncio.to_thread(server.stop, signal.SIGTERM, 60)
    left = await asyncio.to_thread(server.left_over, 10.0)
    return Seen(heard, answers, end.status, end.errors, ended, tuple(broken), tuple(left))


def _identity(server: Server, pid: int) -> tuple[int, int]:
    return next((identity for identity in server.tree.known if identity[0] == pid), (pid, 0))


async def _nobody_waits(
    asked: Sequence[asyncio.Task[Answer]], progress: Sequence[Progress], start: float, seconds: float
) -> float | None:
    """Seconds after `start` until each client has an end, or goes on getting text; None if somebody waits on."""
    window = 1.0
    last_waiting = start
    while time.monotonic() < start + seconds:
        now = time.monotonic()
        waiting = [
            each
            for task, each in zip(asked, progress, strict=True)
            if not task.done() and (each.last < start or now - each.last > window)
        ]
        if waiting:
            last_waiting = now
        elif all(task.done() for task in asked) or now - last_waiting > 2 * window:
            return max(0.0, last_waiting - start)
        await asyncio.sleep(0.02)
    return None
