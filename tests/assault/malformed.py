"""Malformed requests over gRPC and HTTP: each is an error that says what is wrong, and a good stream is unharmed."""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.assault import http1, malformed_grpc, malformed_http
from tests.assault.client import Progress, ask, infer, lone_runs, stubs
from tests.assault.ladder import gone_since
from tests.assault.messages import PROMPTS, leaks, text_request
from tests.assault.report import Report
from tests.assault.repositories import is_exact
from tests.assault.server import Server, serving
from tests.assault.works import broken_models
from tests.patience import eventually

STREAM_TOKENS = 200
"""Of a good stream beside malformed requests."""
_BESIDE = 8
"""Cases for each good stream."""


@dataclass(frozen=True)
class Options:
    """`every`: only each so-many-th case; `skip`: a pattern of cases' names that are left out."""

    every: int = 1
    skip: str = ""
    within: float = 10.0
    slow: bool = True
    """Whether cases that wait for the server to lose patience are among them."""


def run(repository: Path, name: str, options: Options) -> Report:
    """All cases on one server."""
    report = Report(f"malformed, {name}")
    with serving(repository) as server:
        expected = asyncio.run(lone_runs(server.grpc, STREAM_TOKENS, PROMPTS[:1]))[PROMPTS[0]]
        before = server.tree.sample()
        asyncio.run(attack(server, report, expected, options))
        gauges = server.settle()
        report.check("nothing is held afterwards", gauges is not None and gauges.idle, gauges)
        gone = gone_since(before, server)
        report.check("no process ended", not gone, [*gone, *server.errors[-3:]])
        broken = asyncio.run(broken_models(server.grpc)) if server.running else ["serve has ended"]
        report.check("every model answers afterwards", not broken, broken)
        report.check("no segfault in the kernel's log", not server.tree.segfaults(), server.tree.segfaults())
    return report


async def attack(server: Server, report: Report, expected: str, options: Options) -> None:
    """Every case, some beside each good stream."""
    async with stubs(server.grpc, 1) as (stub,):

        async def over_grpc(case: malformed_grpc.Case) -> str:
            return await wrong_with_grpc(stub, case, options.within)

        async def over_http(case: malformed_http.Case) -> str:
            return await wrong_with_http(server.http, case)

        grpc_cases = chosen(malformed_grpc.cases(), options)
        http_cases = [case for case in chosen(malformed_http.cases(), options) if options.slow or case.within < 60]
        await beside_streams(server, report, "gRPC", grpc_cases, over_grpc, expected)
        await beside_streams(server, report, "HTTP", http_cases, over_http, expected)


def chosen(cases: Sequence[Any], options: Options) -> list[Any]:
    """The cases that the options ask for."""
    return [
        case
        for number, case in enumerate(cases)
        if number % options.every == 0 and not (options.skip and re.search(options.skip, case.name))
    ]


async def beside_streams(
    server: Server,
    report: Report,
    protocol: str,
    cases: Sequence[Any],
    attempt: Callable[[Any], Awaitable[str]],
    expected: str,
) -> None:
    """Some cases at a time, with a good stream beside them that has begun before the first of them."""
    start = time.monotonic()
    wrong = harmed = 0
    for at in range(0, len(cases), _BESIDE):
        begun = asyncio.Event()
        async with stubs(server.grpc, 1) as (stub,):
            request = text_request(PROMPTS[0], STREAM_TOKENS)
            stream = asyncio.create_task(ask(stub, request, within=60, on_text=partial(_set, begun)))
            await asyncio.wait([asyncio.create_task(begun.wait()), stream], timeout=30, return_when="FIRST_COMPLETED")
            some = cases[at : at + _BESIDE]
            for case, error in zip(some, await asyncio.gather(*map(attempt, some)), strict=True):
                report.check(f"{protocol} {case.name}", not error, error)
                wrong += bool(error)
            answer = await stream
        same = answer.text == expected if is_exact(server.repository) else bool(answer.text)
        unharmed = answer.kind == "answered" and same
        harmed += not unharmed
        report.check(f"{protocol} stream beside {some[0].name} to {some[-1].name}", unharmed, answer)
        if answer.kind == "lost":
            await asyncio.to_thread(eventually, lambda: not server.running, 5.0)
        if answer.kind == "silent" or not server.running:
            report.check(f"{protocol}: the rest can be tried", False, f"{len(cases) - at - len(some)} cases are left")
            break
    report.rows.append(
        {
            "protocol": protocol,
            "requests": len(cases),
            "wrong": wrong,
            "streams beside": -(-len(cases) // _BESIDE),
            "harmed": harmed,
            "seconds": time.monotonic() - start,
        }
    )


def _set(begun: asyncio.Event, progress: Progress) -> None:
    begun.set()


async def wrong_with_grpc(stub: Any, case: malformed_grpc.Case, within: float) -> str:
    """What is wrong with the server's answer; empty if nothing is."""
    if case.unary:
        outputs, error = await infer(stub, case.request(), within)
        kind = "silent" if error.startswith("SILENT") else "error" if error else "answered"
        text = "".join(map(repr, outputs.values()))
    else:
        answer = await ask(stub, case.request(), within=within)
        kind, error, text = answer.kind, answer.error, answer.text
    if kind in ("silent", "lost"):
        return f"{kind}: {error}"
    if kind == "answered":
        return "" if case.may_answer and text else f"answered with {text[:80]!r}, no error"
    if found := leaks(error):
        return f"the error has {found}: {error[:300]}"
    if not any(name in error for name in case.fields):
        return f"the error names none of {', '.join(case.fields)}: {error[:300]}"
    return ""


async def wrong_with_http(url: str, case: malformed_http.Case) -> str:
    """What is wrong with the server's answer; empty if nothing is."""
    response = await http1.exchange(url, case.sent, case.within, half_close=case.half_close)
    if response.status == 0:
        if not response.closed:
            return f"silent for {response.seconds:.0f} s"
        return "" if case.may_close else "the connection was closed without a response"
    if response.status == 200 and case.may_answer:
        return "" if b"text_output" in response.body else f"an empty answer: {response.body[:80]!r}"
    shown = f"{response.status} {response.body[:300]!r}"
    if response.status != case.status and not 400 <= response.status < 500:
        return shown
    try:
        # An error before the first event of a stream may still be framed as an event.
        error = http1.error_of(json.loads(response.body.strip().removeprefix(b"data:")))
    except ValueError:
        return f"no JSON: {shown}"
    if not error:
        return f"no error in the JSON: {shown}"
    found = leaks(error)
    return f"the error has {found}: {error[:300]}" if found else ""
