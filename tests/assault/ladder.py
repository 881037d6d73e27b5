"""Ever more requests at once: each is answered or refused, the server works afterwards, its memory stays flat."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.assault import http1
from tests.assault.client import Answer, flood, lone_runs
from tests.assault.messages import PROMPTS
from tests.assault.report import Report
from tests.assault.repositories import is_exact
from tests.assault.server import Server, serving
from tests.assault.tree import sampled, total_rss
from tests.assault.works import broken_models

Answers = list[tuple[str, Answer]]
Climb = Callable[[int], Coroutine[None, None, Answers]]

RUNGS = (500, 1000, 2000, 5000, 10000)
_MB = 1e6


@dataclass(frozen=True)
class Options:
    """`connections`: of the HTTP client; a request is silent after `patience` seconds and 1 for every 20 requests."""

    rungs: Sequence[int] = RUNGS
    max_tokens: int = 16
    connections: int = 256
    patience: float = 60.0
    most_growth: float = 1500.0
    """MB that the whole tree may grow by at its peak."""

    def within(self, count: int) -> float:
        """Seconds until a request is silent."""
        return self.patience + count / 20


def run(repository: Path, name: str, options: Options) -> Report:
    """Climb the ladder on one server."""
    report = Report(f"ladder, {name}")
    with serving(repository) as server:
        expected = asyncio.run(lone_runs(server.grpc, options.max_tokens))
        for protocol, climb in floods(server, options).items():
            for count in options.rungs:
                if not rung(server, report, protocol, count, climb, expected, options):
                    return report
        report.check("no segfault in the kernel's log", not server.tree.segfaults(), server.tree.segfaults())
    return report


def floods(server: Server, options: Options) -> Mapping[str, Climb]:
    """What sends that many requests at once, by protocol."""
    return {
        "grpc": lambda count: flood(server.grpc, count, options.max_tokens, options.within(count)),
        "http": lambda count: http_flood(server.http, count, options),
    }


def rung(
    server: Server,
    report: Report,
    protocol: str,
    count: int,
    climb: Climb,
    expected: Mapping[str, str],
    options: Options,
) -> bool:
    """Two rounds of `count` requests; whether the server is fit for the next rung."""
    what = f"{protocol} {count}"
    before = server.tree.sample()
    server.tree.peak_rss = 0
    after: list[int] = []
    answers: Answers = []
    start = time.monotonic()
    with sampled(server.tree):
        for _ in range(2):
            answers += asyncio.run(climb(count))
            gauges = server.settle()
            after.append(total_rss(server.tree.sample()))
    seconds = (time.monotonic() - start) / 2
    kinds = Counter(answer.kind for _, answer in answers)
    wrong = wrong_answers(answers, expected) if is_exact(server.repository) else []
    report.rows.append(
        {
            "requests": what,
            "answered": kinds["answered"],
            "refused": kinds["refused"],
            "errors": kinds["error"] + kinds["lost"],
            "silent": kinds["silent"],
            "wrong": len(wrong),
            "seconds a round": seconds,
            "MB before": round(total_rss(before) / _MB),
            "peak": round(server.tree.peak_rss / _MB),
            "round 1": round(after[0] / _MB),
            "round 2": round(after[1] / _MB),
        }
    )
    others = Counter(f"{answer.kind}: {answer.error[:120]}" for _, answer in answers if answer.kind in UNWANTED)
    report.check(f"{what}: every request is answered or refused", not others, others.most_common(3))
    report.check(f"{what}: some are answered", kinds["answered"] > 0, dict(kinds))
    report.check(f"{what}: answers equal a lone run's", not wrong, wrong[:2])
    report.check(f"{what}: nothing is held afterwards", gauges is not None and gauges.idle, gauges)
    report.check(f"{what}: memory is flat", after[1] <= after[0] * 1.1 + 64 * _MB, [x / _MB for x in after])
    growth = (server.tree.peak_rss - total_rss(before)) / _MB
    report.check(f"{what}: memory is bounded", growth <= options.most_growth, f"grew by {growth:.0f} MB")
    gone = gone_since(before, server)
    report.check(f"{what}: no process ended", not gone, gone)
    broken = asyncio.run(broken_models(server.grpc)) if server.running else ["serve has ended", *server.errors[-3:]]
    return report.check(f"{what}: every model answers afterwards", not broken, broken)


UNWANTED = ("error", "lost", "silent")


def wrong_answers(answers: Answers, expected: Mapping[str, str]) -> list[str]:
    """Answers to the end that are not what the prompt alone gets."""
    return [
        f"{prompt!r}: {answer.text!r} instead of {expected[prompt]!r}"
        for prompt, answer in answers
        if answer.kind == "answered" and answer.text != expected[prompt]
    ]


def gone_since(before: Mapping[int, object], server: Server) -> list[str]:
    """The names of processes that were there and are not any more."""
    now = server.tree.sample()
    return [f"{pid} {getattr(process, 'name', '')}" for pid, process in before.items() if pid not in now]


async def http_flood(url: str, count: int, options: Options) -> Answers:
    """The requests over HTTP generate, as many at once as there are connections."""
    numbers = iter(range(count))
    answers: Answers = []

    async def worker() -> None:
        for number in numbers:
            prompt = PROMPTS[number % len(PROMPTS)]
            got = await http1.generate(url, prompt, options.max_tokens, options.within(count))
            answers.append((prompt, got))

    await asyncio.gather(*(worker() for _ in range(min(count, options.connections))))
    return answers
