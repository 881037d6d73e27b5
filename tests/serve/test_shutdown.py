"""Draining: what finishes, what is cut, and how long that takes."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.statuses import ENGINE, FakeEngine, client
from trtforge.engine_process.control import EngineControl, EngineStatus, EngineUnreachable
from trtforge.serve.shutdown import Toll, drain


class Engine:
    """Requests that take a while each; refuses new ones once it drains. Answers until `ends_at`."""

    def __init__(self, seconds: list[float], ends_at: float = float("inf")) -> None:
        self.now = 0.0
        self.draining = False
        self.reasons: list[str] = []
        self._seconds = seconds
        self._ends_at = ends_at

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.001)

    def status(self, timeout: float = 2.0) -> EngineStatus:
        if self.now >= self._ends_at:
            self.now += timeout
            raise EngineUnreachable("nobody answers")
        return replace(ENGINE, running=sum(seconds > self.now for seconds in self._seconds))

    def drain(self) -> None:
        self.status()
        self.draining = True

    def cut(self, reason: str) -> int:
        cut = self.status().running
        self.reasons.append(reason)
        self._seconds = []
        return cut


def drained(engine: Engine, timeout: float, why: str = "", last: EngineStatus | None = None) -> Toll:
    return drain(engine, timeout, lambda: why, last=last, clock=engine.clock, sleep=engine.sleep)


@given(st.lists(st.floats(0.01, 20), max_size=50), st.floats(0, 10))
def test_every_request_is_finished_or_cut_and_the_timeout_holds(seconds: list[float], timeout: float) -> None:
    engine = Engine(seconds)
    toll = drained(engine, timeout)
    assert engine.draining
    assert toll.finished + toll.cut == len(seconds)
    assert toll.cut <= sum(length > timeout for length in seconds)
    assert toll.cut >= sum(length > timeout + 0.2 for length in seconds)
    assert engine.now <= timeout + 1.0
    assert len(engine.reasons) == (toll.cut > 0)


def test_an_idle_engine_is_not_waited_for() -> None:
    engine = Engine([])
    assert drained(engine, 30) == Toll(0, 0)
    assert engine.now == 0


def test_zero_seconds_cut_at_once_and_clients_hear_why() -> None:
    engine = Engine([5.0, 7.0])
    assert drained(engine, 0) == Toll(0, 2)
    assert engine.reasons == ["the server is stopping: its drain timeout of 0 s has passed"]
    assert engine.now <= 0.6


def test_a_reason_to_hurry_cuts_what_is_left() -> None:
    engine = Engine([5.0])
    assert drained(engine, 30, why="the engine process ended") == Toll(0, 1)
    assert engine.reasons == ["the engine process ended"]


def test_what_an_unreachable_engine_had_left_counts_as_cut() -> None:
    assert drained(Engine([1.0], ends_at=0), 30, last=replace(ENGINE, running=2, waiting=3)) == Toll(0, 5)
    dies = Engine([0.5, 20.0, 30.0], ends_at=2.0)
    assert drained(dies, 30) == Toll(1, 2)
    assert dies.now < 6


@pytest.mark.parametrize(
    ("toll", "line"),
    [
        (Toll(0, 0), "stopped: 0 requests finished while draining, 0 cut"),
        (Toll(1, 4), "stopped: 1 request finished while draining, 4 cut"),
    ],
)
def test_the_last_line_counts(toll: Toll, line: str) -> None:
    assert toll.describe() == line


def test_the_engine_process_is_drained_and_cut_over_its_socket(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path / "s", replace(ENGINE, running=3, waiting=4, clients=(client(7),)))
    assert drain(EngineControl(tmp_path / "s"), 0.2, lambda: "") == Toll(0, 7)
    assert engine.asked[0] == "drain"
    assert engine.asked.count("cut") == 1
    engine.close()
