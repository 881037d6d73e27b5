"""Clients that leave in every way at random: the server survives, frees all that they held and serves the rest."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc import service_pb2_grpc

from tests.assault import h2, http1
from tests.assault.client import Answer, Leave, Progress, ask, channel, lone_runs, stubs
from tests.assault.ladder import UNWANTED, gone_since, wrong_answers
from tests.assault.messages import PROMPTS, STREAM_METHOD, text_request
from tests.assault.report import Report
from tests.assault.repositories import is_exact
from tests.assault.server import Server, serving
from tests.assault.tree import Process, sampled
from tests.assault.works import broken_models

WAYS: Mapping[str, int] = {
    "finish": 30,
    "cancel before the first token": 12,
    "cancel at the first token": 12,
    "cancel after it": 12,
    "close the channel": 8,
    "read slowly": 6,
    "kill -9": 8,
    "half-open": 6,
    "finish over http": 3,
    "close http": 3,
}
"""How clients leave, and in which proportion."""

_GROUP = 20
"""Streams of one client process, and of one connection that nobody reads."""
_SPARE_FDS, _SPARE_THREADS = 64, 64
_MOST_FDS, _MOST_THREADS = 1024, 1536
"""Of one process, after any run."""


@dataclass(frozen=True)
class Options:
    """`requests` of a run, at most `concurrency` at once; `busy`: loops beside it on every core in every second run."""

    requests: int = 2000
    concurrency: int = 500
    runs: int = 20
    seed: int = 0
    max_tokens: int = 48
    within: float = 180.0
    busy: bool = True


@dataclass(frozen=True)
class Baseline:
    """The server's processes when it was new, and after the first run, in which pools of threads fill."""

    new: Mapping[int, Process]
    warm: Mapping[int, Process]


def run(repository: Path, name: str, options: Options) -> Report:
    """All runs on one server; stops when it is no longer fit."""
    report = Report(f"departures, {name}")
    seed = options.seed or random.SystemRandom().randrange(1, 1 << 31)
    print(f"departures: seed {seed}", flush=True)
    report.notes.append(f"seed {seed}")
    with serving(repository) as server:
        attack(server, report, seed, options)
        report.check("no segfault in the kernel's log", not server.tree.segfaults(), server.tree.segfaults())
    return report


def attack(server: Server, report: Report, seed: int, options: Options) -> None:
    """All runs on a server that is ready."""
    expected = asyncio.run(lone_runs(server.grpc, options.max_tokens))
    broken = asyncio.run(broken_models(server.grpc))
    report.check("every model answers before", not broken, broken)
    before = server.tree.sample()
    warm: dict[int, Process] = {}
    for number in range(options.runs):
        busy = options.busy and number % 2 == 1
        rng = random.Random(seed + number)
        with busy_cores() if busy else nullcontext():
            if not one_run(server, report, rng, expected, Baseline(before, warm), options, busy=busy):
                break
        warm = warm or server.tree.sample()


def one_run(
    server: Server,
    report: Report,
    rng: random.Random,
    expected: Mapping[str, str],
    before: Baseline,
    options: Options,
    *,
    busy: bool,
) -> bool:
    """One run of departures; whether the server is fit for another."""
    what = f"run {len(report.rows) + 1}"
    start = time.monotonic()
    with sampled(server.tree, 1.0):
        answers, broken_beside = asyncio.run(depart(server, rng, options))
    seconds = time.monotonic() - start
    gauges = server.settle(60)
    finished = [(prompt, answer) for _, prompt, answer in answers]
    wrong = wrong_answers(finished, expected) if is_exact(server.repository) else []
    kinds = Counter(answer.kind for _, answer in finished)
    unwanted = Counter(f"{way}: {a.kind} {a.error[:120]}" for way, _, a in answers if a.kind in UNWANTED)
    grown = grown_processes(before.warm, server) if before.warm else too_many(server)
    report.rows.append(
        {
            "run": f"{what}{' beside busy cores' if busy else ''}",
            "requests": options.requests,
            "answered": kinds["answered"],
            "left": options.requests - len(finished) + kinds["cancelled"],
            "refused": kinds["refused"],
            "errors": sum(unwanted.values()),
            "wrong": len(wrong),
            "seconds": seconds,
            **held(server),
        }
    )
    report.check(f"{what}: who stays is answered or refused", not unwanted, unwanted.most_common(3))
    report.check(f"{what}: answers equal a lone run's", not wrong, wrong[:2])
    report.check(f"{what}: every model answers beside half-open clients", not broken_beside, broken_beside)
    report.check(f"{what}: nothing is held afterwards", gauges is not None and gauges.idle, gauges)
    report.check(f"{what}: descriptors and threads are bounded", not grown, grown)
    gone = gone_since(before.new, server)
    report.check(f"{what}: no process ended", not gone, [*gone, *server.errors[-3:]])
    broken = asyncio.run(broken_models(server.grpc)) if server.running else ["serve has ended", *server.errors[-3:]]
    return report.check(f"{what}: every model answers afterwards", not broken, broken)


def held(server: Server) -> dict[str, int]:
    """What the whole tree holds now."""
    now = server.tree.sample().values()
    return {
        "fds": sum(process.fds for process in now),
        "threads": sum(process.threads for process in now),
        "MB": round(sum(process.rss for process in now) / 1e6),
    }


def too_many(server: Server) -> list[str]:
    """Processes with more descriptors or threads than any needs."""
    return [
        f"{process.name}: {process.fds} descriptors, {process.threads} threads"
        for process in server.tree.sample().values()
        if process.fds > _MOST_FDS or process.threads > _MOST_THREADS
    ]


def grown_processes(before: Mapping[int, Process], server: Server, seconds: float = 20.0) -> list[str]:
    """Processes with many more descriptors or threads than before, once there was time to let go of them.

    Connections that this process still holds open do not count: grpc keeps some after `close`.
    """
    until = time.monotonic() + seconds
    while True:
        now = server.tree.sample()
        most_fds = _SPARE_FDS + sum(1 for _ in Path("/proc/self/fd").iterdir())
        grown = [
            f"{now[pid].name}: {was.fds} to {now[pid].fds} descriptors, {was.threads} to {now[pid].threads} threads"
            for pid, was in before.items()
            if pid in now and (now[pid].fds > was.fds + most_fds or now[pid].threads > was.threads + _SPARE_THREADS)
        ]
        if not grown or time.monotonic() > until:
            return grown
        time.sleep(0.5)


async def depart(
    server: Server, rng: random.Random, options: Options
) -> tuple[list[tuple[str, str, Answer]], list[str]]:
    """Way, prompt and answer of each request whose client could tell; and what does not work beside half-open ones."""
    groups, singles = plan(rng, options.requests)
    room = asyncio.Semaphore(options.concurrency)
    answers: list[tuple[str, str, Answer]] = []
    hung: list[h2.Connection] = []
    async with stubs(server.grpc, options.concurrency) as many:
        ways = single_ways(server, rng, options)

        async def single(number: int, way: str) -> None:
            prompt = PROMPTS[number % len(PROMPTS)]
            async with room:
                answers.append((way, prompt, await ways[way](many[number % len(many)], prompt)))

        async def group(way: str) -> None:
            await asyncio.sleep(rng.random() * 2)
            if way == "kill -9":
                await kill_client(server.grpc, rng.uniform(0.0, 1.0), options)
            else:
                await asyncio.to_thread(hang, server.grpc, hung, rng.random() < 0.5)

        work = [group(way) for way in groups] + [single(number, way) for number, way in enumerate(singles)]
        await asyncio.gather(*work)
    broken = await broken_models(server.grpc) if server.running else ["serve has ended"]
    for connection in hung:
        connection.close(reset=rng.random() < 0.5)
    return answers, broken


def plan(rng: random.Random, requests: int) -> tuple[list[str], list[str]]:
    """Ways of whole groups, and of single requests, in random order; together they make that many requests."""
    shares = sum(WAYS.values())
    in_groups = [way for way in ("kill -9", "half-open") for _ in range(requests * WAYS[way] // shares // _GROUP)]
    alone = {way: share for way, share in WAYS.items() if way not in ("kill -9", "half-open")}
    singles = rng.choices(list(alone), list(alone.values()), k=requests - _GROUP * len(in_groups))
    return in_groups, singles


def single_ways(
    server: Server, rng: random.Random, options: Options
) -> dict[str, Callable[[object, str], Awaitable[Answer]]]:
    """What a client of each kind does with a prompt."""
    tokens, within = options.max_tokens, options.within

    def leave_after(count: int) -> Callable[[Progress], None]:
        def leave(progress: Progress) -> None:
            if progress.responses >= count:
                raise Leave

        return leave

    async def cancel_before(stub: object, prompt: str) -> Answer:
        asked = asyncio.create_task(ask(stub, text_request(prompt, tokens), within=within))
        await asyncio.sleep(rng.choice((0.0, rng.random() * 0.05)))
        asked.cancel()
        with suppress(asyncio.CancelledError):
            return await asked
        return Answer("cancelled")

    async def close_channel(stub: object, prompt: str) -> Answer:
        own = channel(server.grpc)
        try:
            leave = leave_after(rng.randint(1, 8))
            return await ask(
                service_pb2_grpc.GRPCInferenceServiceStub(own),
                text_request(prompt, tokens),
                within=within,
                on_text=leave,
            )
        finally:
            await own.close(grace=None)

    return {
        "finish": lambda stub, prompt: ask(stub, text_request(prompt, tokens), within=within),
        "cancel before the first token": cancel_before,
        "cancel at the first token": lambda stub, prompt: ask(
            stub, text_request(prompt, tokens), within=within, on_text=leave_after(1)
        ),
        "cancel after it": lambda stub, prompt: ask(
            stub, text_request(prompt, tokens), within=within, on_text=leave_after(rng.randint(2, 16))
        ),
        "close the channel": close_channel,
        "read slowly": lambda stub, prompt: ask(stub, text_request(prompt, tokens), within=within, pause=0.1),
        "finish over http": lambda stub, prompt: http1.generate(server.http, prompt, tokens, within),
        "close http": lambda stub, prompt: http1.leave_stream(server.http, prompt, tokens, rng.randint(0, 8), within),
    }


async def kill_client(url: str, after: float, options: Options) -> None:
    """A client process with open streams, killed some time after they began."""
    words = ["-m", "tests.assault.departing", url, str(_GROUP), str(options.max_tokens * 4)]
    child = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2]
    )
    assert child.stdout is not None
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(child.stdout.readline(), options.within)
    await asyncio.sleep(after)
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    await child.wait()


def hang(url: str, hung: list[h2.Connection], tiny: bool) -> None:
    """A connection whose streams nobody reads: its send buffer fills, or its window is closed from the start."""
    with suppress(OSError):
        connection = h2.Connection(url, window=0 if tiny else 2**31 - 1, receive_buffer=2048)
        hung.append(connection)
        for number in range(_GROUP):
            request = text_request(PROMPTS[number % len(PROMPTS)], 1000)
            connection.open(STREAM_METHOD, request.SerializeToString())


@contextmanager
def busy_cores() -> Iterator[None]:
    """A loop on every core while this lasts."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
