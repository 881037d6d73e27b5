"""Requests with an allotted time end with what they have when it has passed, wherever they are."""

import queue
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.runtime.checkpoints import write_engine
from tests.runtime.test_engine import Tokens, requests_for
from trtforge.engine_process.requests import BeamParams, GenerationRequest, Guide, Output
from trtforge.runtime import deadlines
from trtforge.runtime.deadlines import Deadlines
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.guidance.guides import Guides
from trtforge.runtime.scheduling.sequence import Sequence


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadlines, "monotonic", clock)
    return clock


def answers(outputs: "queue.SimpleQueue[Output]", count: int) -> dict[str, tuple[Tokens, str]]:
    """Tokens and finish reason of so many requests."""
    tokens: dict[str, Tokens] = {}
    reasons: dict[str, str] = {}
    while len(reasons) < count:
        output = outputs.get(timeout=60)
        assert output.error is None
        tokens[output.request_id] = (*tokens.get(output.request_id, ()), *output.tokens)
        if output.finish_reason is not None:
            reasons[output.request_id] = output.finish_reason
    return {name: (tokens[name], reason) for name, reason in reasons.items()}


def test_a_request_ends_with_what_it_has(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens], clock: Clock
) -> None:
    """The first one's time passes with its third token; another waits as long, and never runs."""
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    limited, free, waiting = requests_for(prompts[:3], 24)
    seen = [0]

    def count(output: Output) -> None:
        seen[0] += len(output.tokens)
        if seen[0] == 3:
            clock.now += 2.0
        outputs.put(output)

    with Engine.load(engine_directory, EngineOptions(max_batch_size=2)) as engine:
        asked = (replace(limited, allotted_time_ms=2000), count)
        engine.submit((free, outputs.put), asked, (replace(waiting, allotted_time_ms=1999), outputs.put))
        found = answers(outputs, 3)
        assert engine.statistics().kv_blocks_used == 0
        assert engine._deadlines.seconds_left() is None
    assert found == {
        "0": (expected[0][:3], "timed_out"),
        "1": (expected[1], "length"),
        "2": ((), "timed_out"),
    }


def test_a_beam_search_has_nothing_yet(
    checkpoint: Path, tmp_path: Path, prompts: list[list[int]], clock: Clock
) -> None:
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    request = replace(requests_for(prompts[:1], 90)[0], beams=BeamParams(3, 2), allotted_time_ms=5)
    with Engine.load(write_engine(checkpoint, tmp_path / "engine", max_beam_width=3)) as engine:
        engine.submit((request, outputs.put))
        engine.after_steps(lambda: setattr(clock, "now", clock.now + 0.001))
        assert answers(outputs, 1) == {"0": ((), "timed_out")}
        assert engine.statistics().kv_blocks_used == 0


def test_an_idle_engine_wakes_for_a_request_whose_guide_is_compiled(
    engine_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would wake it."""
    monkeypatch.setattr(Guides, "prepare", lambda *_: False)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    with Engine.load(engine_directory) as engine:
        guided = GenerationRequest(
            "0", (5,), 4, guide=Guide("regex", "a+"), end_ids=frozenset((9,)), allotted_time_ms=20
        )
        engine.submit((guided, outputs.put))
        assert answers(outputs, 1) == {"0": ((), "timed_out")}


def test_a_time_beyond_what_threads_can_wait_for_never_passes(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that waits for a guide sleeps until the time has passed."""
    monkeypatch.setattr(Guides, "prepare", lambda *_: False)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    guided = GenerationRequest("1", (5,), 4, guide=Guide("regex", "a+"), end_ids=frozenset((9,)))
    with Engine.load(engine_directory) as engine:
        engine.submit((replace(guided, allotted_time_ms=10**400), outputs.put))
        woken = threading.Event()
        engine.ping(woken.set)
        assert woken.wait(60)
        engine.submit((requests_for(prompts[:1], 24)[0], outputs.put))
        assert answers(outputs, 1) == {"0": (expected[0], "length")}


class AsAList(RuleBasedStateMachine):
    """`Deadlines` beside a list that is looked through."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(deadlines, "monotonic", self.clock)
        self.deadlines = Deadlines()
        self.known: list[tuple[Sequence, float]] = []

    def teardown(self) -> None:
        self.patch.undo()

    @rule(allotted=st.none() | st.integers(1, 5000))
    def add(self, allotted: int | None) -> None:
        request = GenerationRequest(str(len(self.known)), (1,), 4, allotted_time_ms=allotted)
        sequence = Sequence.of(request, len(self.known), 64, lambda output: None)
        self.deadlines.add(sequence)
        if allotted is not None:
            self.known.append((sequence, self.clock.now + allotted / 1000))

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if self.known:
            sequence, _ = self.known.pop(data.draw(st.integers(0, len(self.known) - 1)))
            self.deadlines.forget(sequence)

    @rule(seconds=st.floats(0, 3))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def end(self) -> None:
        due = [sequence for sequence, end in self.known if end <= self.clock.now]
        assert self.deadlines.passed() == due
        for sequence in due:
            self.deadlines.forget(sequence)
        self.known = [each for each in self.known if each[0] not in due]

    @invariant()
    def is_woken_in_time(self) -> None:
        left = self.deadlines.seconds_left()
        if not self.known:
            assert left is None
        else:
            assert left is not None
            assert left <= max(min(end for _, end in self.known) - self.clock.now, 0.0)


TestAsAList = AsAList.TestCase
