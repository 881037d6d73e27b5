"""Starts and stops: each is quick, nothing crashes and nothing is left; streams are whole, or told and counted."""

import asyncio
import re
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.assault.client import Answer, Progress, ask, lone_runs, stubs
from tests.assault.messages import PROMPTS, text_request
from tests.assault.report import Figure, Report
from tests.assault.repositories import is_exact
from tests.assault.server import AssaultError, Server, Stopped, serving
from tests.assault.works import broken_models

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Options:
    """`times`: starts and stops; `longest`: seconds that a stop may take, `drained`: one that lets streams finish;
    `streams`: open when a busy server stops.
    """

    times: int = 100
    longest: float = 5.0
    drained: float = 60.0
    streams: int = 50


def run(repository: Path, name: str, options: Options) -> Report:
    """Idle stops, alternately right after the start and after some requests; then stops with streams."""
    report = Report(f"starts and stops, {name}")
    slowest = 0.0
    for number in range(options.times):
        with serving(repository) as server:
            if number % 2:
                broken = asyncio.run(broken_models(server.grpc))
                report.check(f"start {number + 1}: every model answers", not broken, broken)
            stopped = server.stop(_SIGNALS[number // 2 % 2])
            slowest = max(slowest, stopped.seconds)
            judge_stop(report, f"stop {number + 1}", server, stopped, options.longest)
    if options.times:
        report.rows.append({"what": "idle", "stops": options.times, "slowest": slowest})
    for number in _SIGNALS:
        for tokens, drain in ((900, None), (1000, 1)):
            try:
                with_streams(report, repository, number, options, tokens=tokens, drain=drain)
            except AssaultError as error:
                report.check(f"{number.name} with streams, drain timeout {drain}: can be tried", False, error)
    return report


def judge_stop(report: Report, what: str, server: Server, stopped: Stopped, longest: float, status: int = 0) -> None:
    """A stop that is quick, ends with the status, without a crash, and leaves nothing."""
    report.check(f"{what}: within {longest:.0f} s", stopped.seconds <= longest, f"{stopped.seconds:.1f} s")
    seen = f"{stopped.status}, expected {status}: {stopped.errors[-3:]}"
    report.check(f"{what}: exit status", stopped.status == status, seen)
    crashes = [*server.tree.segfaults(), *(line for line in stopped.errors if "Signal (11)" in line)]
    report.check(f"{what}: no segfault", not crashes, crashes[:2])
    left = server.left_over()
    report.check(f"{what}: nothing is left", not left, left)


def with_streams(
    report: Report, repository: Path, number: signal.Signals, options: Options, *, tokens: int, drain: int | None
) -> None:
    """A stop while streams are open; `drain`: seconds that they get, None for the default, which lets them finish."""
    what = f"{number.name} with {options.streams} streams" + (f", drain timeout {drain} s" if drain is not None else "")
    settings = () if drain is None else ("--drain-timeout", str(drain))
    with serving(repository, *settings) as server:
        prompts = PROMPTS if is_exact(repository) and drain is None else ()
        expected = asyncio.run(lone_runs(server.grpc, tokens, prompts))
        answers, stopped = asyncio.run(_stop_beside(server, number, options.streams, tokens))
        kinds = Counter(answer.kind for answer in answers)
        cut = len(answers) - kinds["answered"]
        wrong = [
            answer.text
            for place, answer in enumerate(answers)
            if answer.kind == "answered" and expected and answer.text != expected[PROMPTS[place % len(PROMPTS)]]
        ]
        last = next((line for line in reversed([*server.output, *stopped.errors]) if line.strip()), "")
        row: dict[str, Figure] = {
            "what": what,
            "stops": 1,
            "slowest": stopped.seconds,
            "whole": kinds["answered"],
            "cut": cut,
        }
        report.rows.append(row)
        report.check(f"{what}: no stream is silent", not kinds["silent"], dict(kinds))
        report.check(f"{what}: what is whole is right", not wrong, wrong[:1])
        untold = [answer.error for answer in answers if answer.kind == "lost"]
        report.check(f"{what}: who is cut gets the server's error", not untold, untold[:2])
        if drain is None:
            report.check(f"{what}: all are whole", cut == 0, dict(kinds))
        else:
            counted = str(cut) in re.findall(r"\d+", " ".join([last, *stopped.errors[-3:]]))
            report.check(f"{what}: the last lines count the {cut} that were cut", counted, stopped.errors[-3:])
        longest = options.drained if drain is None else drain + options.longest
        judge_stop(report, what, server, stopped, longest, 0 if cut == 0 else 1)


async def _stop_beside(
    server: Server, number: signal.Signals, streams: int, tokens: int
) -> tuple[list[Answer], Stopped]:
    progress = [Progress() for _ in range(streams)]
    async with stubs(server.grpc, streams) as many:
        asked = [
            asyncio.create_task(
                ask(many[0], text_request(PROMPTS[place % len(PROMPTS)], tokens), within=120, progress=each)
            )
            for place, each in enumerate(progress)
        ]
        # The signal comes when the engine has taken all: one that arrives later is refused, as it must be.
        for _ in range(600):
            if all(each.responses for each in progress):
                break
            gauges = await asyncio.to_thread(server.gauges)
            if gauges is not None and gauges.active == streams and any(each.responses for each in progress):
                break
            await asyncio.sleep(0.05)
        if all(one.done() for one in asked):
            raise AssaultError(f"{streams} streams of {tokens} tokens ended before all were seen to be open")
        stopped = await asyncio.to_thread(server.stop, number, 120)
        return list(await asyncio.gather(*asked)), stopped
