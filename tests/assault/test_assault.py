"""The attacks in small: one repository, few requests; `make assault` has the whole."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.assault import departures, kills, ladder, malformed, startstop
from tests.assault.client import lone_runs
from tests.assault.messages import PROMPTS
from tests.assault.report import Report
from tests.assault.repositories import build
from tests.assault.server import Server
from tests.assault.works import broken_models
from tests.patience import PATIENCE

_TOKENS = 16


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("demo-fp32", tmp_path_factory.mktemp("assault"))


@pytest.fixture(scope="module")
def started() -> Iterator[list[Server]]:
    servers: list[Server] = []
    yield servers
    for one in servers:
        one.close()


@pytest.fixture
def server(repository: Path, started: list[Server]) -> Server:
    """The server of the test before if it is fit, else another one: a failure is of one test."""
    if not (started and started[-1].running and not asyncio.run(broken_models(started[-1].grpc, PATIENCE))):
        for one in started:
            one.close()
        started.append(Server(repository))
        started[-1].wait_ready()
    return started[-1]


def require(report: Report) -> None:
    """Fail with every check that does not hold."""
    assert report.passed, "\n".join(f"{check.what}: {check.seen}" for check in report.failures) or "nothing was checked"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_many_requests_at_once_are_answered_or_refused(server: Server, protocol: str) -> None:
    report = Report(protocol)
    options = ladder.Options(max_tokens=_TOKENS, connections=128)
    climb = ladder.floods(server, options)[protocol]
    expected = asyncio.run(lone_runs(server.grpc, _TOKENS))
    ladder.rung(server, report, protocol, 400, climb, expected, options)
    require(report)


def test_clients_that_leave_harm_nobody(server: Server) -> None:
    report = Report("departures")
    options = departures.Options(requests=200, concurrency=100, max_tokens=_TOKENS, runs=1)
    departures.attack(server, report, seed=20, options=options)
    require(report)


def test_malformed_requests_are_explained_and_harm_nobody(server: Server) -> None:
    report = Report("malformed")
    options = malformed.Options(every=4, slow=False, within=PATIENCE)
    expected = asyncio.run(lone_runs(server.grpc, malformed.STREAM_TOKENS, PROMPTS[:1]))[PROMPTS[0]]
    asyncio.run(malformed.attack(server, report, expected, options))
    require(report)


def test_a_killed_process_is_heard_of_and_leaves_nothing(repository: Path) -> None:
    """How fast is judged by `make assault`; here, that nobody waits for ever."""
    options = kills.Options(hear_kill=PATIENCE)
    seen = kills.one(repository, "stub tensorrt_llm", signal.SIGKILL, True, options)
    assert isinstance(seen, kills.Seen), seen
    assert seen.heard is not None
    assert seen.status == 1
    assert kills.has_error(seen.errors), seen.errors
    assert seen.left == ()


def test_a_server_with_streams_stops_when_they_are_whole(repository: Path) -> None:
    report = Report("stop")
    options = startstop.Options(streams=20, drained=PATIENCE)
    startstop.with_streams(report, repository, signal.SIGTERM, options, tokens=900, drain=None)
    require(report)
