"""A long mixed load: streams, whole answers, departures, malformed requests and probes; figures once a minute."""

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.assault import http1, malformed_grpc
from tests.assault.client import Answer, ask, lone_runs, stubs
from tests.assault.departures import Options as Departures
from tests.assault.departures import grown_processes, hang, held, kill_client, single_ways, too_many
from tests.assault.h2 import Connection
from tests.assault.ladder import UNWANTED, gone_since
from tests.assault.malformed import wrong_with_grpc
from tests.assault.messages import PROMPTS, TEXT_MODELS, text_request
from tests.assault.report import Report
from tests.assault.repositories import is_exact
from tests.assault.server import Server, serving
from tests.assault.works import broken_models

_MB = 1e6
_KEPT_BY_TRITON = 0.04
"""MB that Triton before 25.04 keeps of a stream that its client cancels (triton-inference-server/server #8078)."""
_FOREIGN_ERRORS = 10_000
"""Requests for each of which Triton before 25.04 may give one the error of another client's malformed request (the same
race, known hole grpc-cancel-race): one or two of 40,000 were seen.
"""
_STILL_WARMING = 0.25
"""Share of the samples that the slope of the memory leaves out."""


@dataclass(frozen=True)
class Options:
    """`seconds` of load by `workers`, a sample every `period` seconds; `slope`: MB that an hour may add."""

    seconds: float = 3600.0
    workers: int = 24
    period: float = 60.0
    seed: int = 0
    max_tokens: int = 64
    within: float = 120.0
    slope: float = 100.0


@dataclass
class Tally:
    """What was done so far."""

    kinds: Counter[str] = field(default_factory=Counter)
    unwanted: Counter[str] = field(default_factory=Counter)
    foreign: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    responses: int = 0
    malformed: int = 0
    probes: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class Sample:
    """The tree at one moment. `seconds` since the load began."""

    seconds: float
    rss: int
    fds: int
    threads: int


def run(repository: Path, name: str, options: Options) -> Report:
    """The load on one server, its figures and its judgement."""
    report = Report(f"soak of {options.seconds:.0f} s, {name}")
    seed = options.seed or random.SystemRandom().randrange(1, 1 << 31)
    print(f"soak: seed {seed}", flush=True)
    report.notes.append(f"seed {seed}")
    with serving(repository) as server:
        expected = asyncio.run(lone_runs(server.grpc, options.max_tokens))
        asyncio.run(broken_models(server.grpc))
        before = server.tree.sample()
        tally, samples = Tally(), [_sample(server, 0.0)]
        asyncio.run(_load(server, random.Random(seed), expected, options, tally, samples))
        gauges = server.settle(60)
        _judge(report, server, options, tally, samples)
        report.check("nothing is held afterwards", gauges is not None and gauges.idle, gauges)
        grown = grown_processes(before, server) if options.seconds > options.period * 10 else too_many(server)
        report.check("descriptors and threads are bounded", not too_many(server), grown)
        gone = gone_since(before, server)
        report.check("no process ended", not gone, [*gone, *server.errors[-3:]])
        broken = asyncio.run(broken_models(server.grpc)) if server.running else ["serve has ended"]
        report.check("every model answers afterwards", not broken, broken)
        report.check("no segfault in the kernel's log", not server.tree.segfaults(), server.tree.segfaults())
    return report


def slope(samples: list[Sample]) -> float:
    """MB an hour that the memory grows by: least squares, the warm-up left out."""
    late = samples[int(len(samples) * _STILL_WARMING) :]
    if len(late) < 3:
        return 0.0
    hours, sizes = [each.seconds / 3600 for each in late], [each.rss / _MB for each in late]
    middle, mean = sum(hours) / len(hours), sum(sizes) / len(sizes)
    spread = sum((hour - middle) ** 2 for hour in hours)
    return sum((hour - middle) * (size - mean) for hour, size in zip(hours, sizes, strict=True)) / spread


def of_malformed(error: str) -> bool:
    """Whether an error names a field of a malformed request; those of the load have no wrong field."""
    return any(name in error for case in malformed_grpc.cases() for name in case.fields)


def _judge(report: Report, server: Server, options: Options, tally: Tally, samples: list[Sample]) -> None:
    rate = slope(samples)
    figures: Mapping[str, str | int | float] = {
        "requests": sum(tally.kinds.values()),
        "answered": tally.kinds["answered"],
        "refused": tally.kinds["refused"],
        "left by their clients": tally.kinds["cancelled"],
        "responses with text": tally.responses,
        "malformed requests": tally.malformed,
        "probes that held": tally.probes[0],
        "errors, lost or silent": sum(tally.unwanted.values()),
        "errors of others' malformed requests": sum(tally.foreign.values()),
        "wrong answers": len(tally.wrong),
        "memory at the start, MB": round(samples[0].rss / _MB),
        "memory at the end, MB": round(samples[-1].rss / _MB),
        "memory at its peak, MB": round(max(server.tree.peak_rss, *(each.rss for each in samples)) / _MB),
        "memory's slope, MB an hour": rate,
        "descriptors, start and end": f"{samples[0].fds}, {samples[-1].fds}",
        "threads, start and end": f"{samples[0].threads}, {samples[-1].threads}",
    }
    report.rows += [{"figure": name, "value": value} for name, value in figures.items()]
    report.check("who stays is answered or refused", not tally.unwanted, tally.unwanted.most_common(3))
    most = 1 + sum(tally.kinds.values()) // _FOREIGN_ERRORS
    seen = tally.foreign.most_common(3)
    report.check(f"at most {most} got the error of another's request", tally.foreign.total() <= most, seen)
    report.check("answers equal a lone run's", not tally.wrong, tally.wrong[:2])
    report.check("some are answered", tally.kinds["answered"] > 0, dict(tally.kinds))
    failed = sum(tally.probes.values()) - tally.probes[0]
    report.check("every probe holds", not failed, dict(tally.probes))
    # A slope over a few minutes says nothing about an hour.
    if options.seconds >= 1800:
        cancelled = (tally.kinds["cancelled"] + tally.malformed) * 3600 / options.seconds
        limit = options.slope + _KEPT_BY_TRITON * cancelled
        report.check(f"memory grows by at most {limit:.0f} MB an hour", rate <= limit, rate)


async def _load(
    server: Server,
    rng: random.Random,
    expected: Mapping[str, str],
    options: Options,
    tally: Tally,
    samples: list[Sample],
) -> None:
    start = time.monotonic()
    until = start + options.seconds
    departures = Departures(max_tokens=options.max_tokens, within=options.within)
    ways = single_ways(server, rng, departures)
    exact = is_exact(server.repository)

    def note(way: str, prompt: str, answer: Answer) -> None:
        tally.kinds[answer.kind] += 1
        tally.responses += answer.responses
        if answer.kind == "error" and of_malformed(answer.error):
            tally.foreign[f"{way}: {answer.error[:120]}"] += 1
        elif answer.kind in UNWANTED:
            tally.unwanted[f"{way}: {answer.kind} {answer.error[:120]}"] += 1
        elif answer.kind == "answered" and exact and answer.text != expected[prompt]:
            tally.wrong.append(f"{way}: {answer.text[:80]!r}")

    async def worker() -> None:
        async with stubs(server.grpc, 1) as (stub,):
            while time.monotonic() < until and server.running:
                prompt = rng.choice(PROMPTS)
                way = rng.choice(["plain"] * 2 * len(ways) + list(ways) + ["whole", "http"])
                if way in ways:
                    note(way, prompt, await ways[way](stub, prompt))
                elif way == "http":
                    answer = await http1.generate(server.http, prompt, options.max_tokens, options.within)
                    note(way, prompt, answer)
                else:
                    request = text_request(prompt, options.max_tokens, rng.choice(TEXT_MODELS), stream=way == "plain")
                    note(way, prompt, await ask(stub, request, within=options.within))

    async def rough() -> None:
        cases = malformed_grpc.cases()
        async with stubs(server.grpc, 1) as (stub,):
            while time.monotonic() < until and server.running:
                await asyncio.sleep(rng.uniform(0.5, 2.0))
                await wrong_with_grpc(stub, rng.choice(cases), options.within)
                tally.malformed += 1

    async def leavers() -> None:
        while time.monotonic() < until and server.running:
            await asyncio.sleep(rng.uniform(5, 20))
            hung: list[Connection] = []
            await asyncio.to_thread(hang, server.grpc, hung, rng.random() < 0.5)
            await kill_client(server.grpc, rng.random(), departures)
            for connection in hung:
                connection.close(reset=rng.random() < 0.5)

    async def probes() -> None:
        while time.monotonic() < until and server.running:
            await asyncio.sleep(min(15.0, options.period))
            words = ["-m", "trtforge", "probe", "ready", "--url", server.http, "--timeout", "60"]
            child = await asyncio.create_subprocess_exec(
                sys.executable, *words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            tally.probes[await child.wait()] += 1

    async def sampler() -> None:
        while time.monotonic() < until and server.running:
            await asyncio.sleep(max(0.1, min(options.period, until - time.monotonic())))
            samples.append(await asyncio.to_thread(_sample, server, time.monotonic() - start))

    await asyncio.gather(*(worker() for _ in range(options.workers)), rough(), leavers(), probes(), sampler())


def _sample(server: Server, seconds: float) -> Sample:
    figures = held(server)
    return Sample(seconds, figures["MB"] * int(_MB), figures["fds"], figures["threads"])
