"""The run as a whole: which servers are started and what is concluded, with servers whose figures are given."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtforge.core.errors import ForgeError
from trtforge.core.progress import Silent
from trtforge.core.serving import ServingConfig
from trtforge.serve.local_server import LocalServer
from trtforge.serve.speed import Answers, Load
from trtforge.tune.goal import Goal
from trtforge.tune.result import NO_TIME
from trtforge.tune.tuner import Budget, Tuner
from trtforge.tune.variants import PRESENT, Limits, Variant

LOAD = Load(concurrency=(4, 16, 32), requests=32, prompt_tokens=128, max_tokens=10)
WAVES = (1.0, 1.04, 0.97, 1.02, 0.99, 1.01)
"""Noise: factors of a server's figures, in turn."""


class Machine:
    """Servers of variants by name. `speeds`: tokens per second by load; `first`: milliseconds, by load."""

    def __init__(self, speeds: Mapping[str, Mapping[int, float]], first: Mapping[int, float]) -> None:
        self.speeds, self.first = speeds, first
        self.started: list[str] = []
        self.measured: list[tuple[str, int]] = []
        self.running = 0
        self.ends_after = 10**9
        self.fails_after = 10**9
        self.failing = ""
        """The only variant that fails then, if it is named."""
        self.seconds, self.clock = 0.0, 0.0
        """What the start of a server takes, and a load; and the time, which passes only so."""
        self.slow = ""
        """The only variant whose times are those of `first`, if it is named; those of the others are short."""

    @contextmanager
    def served(self, variant: Variant) -> Iterator[LocalServer]:
        broken = len(self.started) >= self.fails_after and self.failing in ("", variant.name)
        if variant.name not in self.speeds or broken:
            raise ForgeError(f"{variant.name} does not start\nwith more lines", hint="")
        self.started.append(variant.name)
        self.clock += self.seconds
        self.running += 1
        assert self.running == 1
        yield LocalServer(variant.name, "", "")
        self.running -= 1

    def answers(self, name: str, level: int) -> Answers | None:
        if len(self.measured) >= self.ends_after:
            return None
        self.measured.append((name, level))
        self.clock += self.seconds
        tokens = self.speeds[name].get(level, 1500.0) * WAVES[len(self.measured) % len(WAVES)]
        first = self.first.get(level, float(level)) if self.slow in ("", name) else float(level)
        return Answers(level, LOAD.requests * LOAD.max_tokens / tokens, (128,), (320,), (first,), (1.0,), (first + 9,))


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run on a machine."""

    def run(machine: Machine, goal: Goal | None = None, *, seconds: float = 1000, kv: int | None = None) -> Any:
        class Meter:
            def __init__(self, url: str, *_: object) -> None:
                self.name, self.done = url, None

            def answers(self, level: int, until: float) -> Answers | None:
                return machine.answers(self.name, level)

        monkeypatch.setattr("trtforge.tune.tuner.Meter", Meter)
        monkeypatch.setattr("trtforge.tune.tuner.kv_tokens", lambda server: kv)
        monkeypatch.setattr("trtforge.tune.tuner.compile_kernels", lambda facts: None)
        place: Any = SimpleNamespace(
            packaged=SimpleNamespace(config=SimpleNamespace(serving=ServingConfig()), facts=None),
            served=machine.served,
            model="ensemble",
            tokenizer=Path("tokenizer.json"),
        )
        monkeypatch.setattr("trtforge.tune.tuner.time", SimpleNamespace(monotonic=lambda: machine.clock))
        budget = Budget(machine.clock + seconds, 4)
        engine = Limits("torch", 32, 8192, chunked_context=True)
        return Tuner(place, engine, goal or Goal(), LOAD, budget, Silent(), said.append).run()

    said: list[str] = []
    return run


def speeds(**other: Mapping[int, float]) -> dict[str, Mapping[int, float]]:
    """Of all variants: as the present settings, unless `other` says so; the last ones are needless or do not start."""
    present = {4: 1000.0, 32: 2000.0}
    named = {PRESENT: present, "max_batch_size 16": {**present, 32: 1300.0}, "max_batch_size 8": present}
    return named | {name.replace("_at_", " "): figures for name, figures in other.items()}


def by_name(found: Any) -> dict[str, Any]:
    return {trial.variant.name: trial for trial in found.trials}


def test_a_variant_that_is_better_in_every_repetition_is_recommended(tune: Any) -> None:
    machine = Machine(speeds(max_batch_size_at_8={4: 1.0, 16: 1.0, 32: 2600.0}), {})
    found = tune(machine, kv=10**6)
    assert found.recommended.changes == {"max_batch_size": 8}
    assert found.highest_load is None
    trials = by_name(found)
    assert trials["max_batch_size 8"].comparison.verdict == "better"
    assert trials["max_batch_size 8"].comparison.gain == pytest.approx(0.3, abs=0.1)
    assert trials["max_batch_size 16"].untried == "clearly worse"
    assert len(trials["max_batch_size 16"].points) == 1
    assert trials["scheduler max_utilization"].untried.startswith(
        "the KV cache of 1,000,000 tokens holds all that runs at once"
    )
    assert trials["max_num_tokens 256"].untried == "max_num_tokens 256 does not start"
    pair = [PRESENT, "max_batch_size 8"]
    assert machine.started == [PRESENT, "max_batch_size 16", "max_batch_size 8", *pair, *pair[::-1], *pair, *pair[::-1]]


def test_noise_recommends_nothing(tune: Any) -> None:
    machine = Machine(speeds(), {})
    found = tune(machine, kv=10**6)
    assert found.recommended == Variant()
    assert by_name(found)["max_batch_size 8"].comparison.verdict == "no difference"
    assert len(by_name(found)["max_batch_size 8"].comparison.variant) == 4


def test_latency_is_compared_at_the_highest_load(tune: Any) -> None:
    machine = Machine(speeds(), {4: 1, 16: 5, 32: 9})
    tune(machine, Goal(objective="latency"), kv=10**6)
    assert machine.measured[:5] == [
        (PRESENT, 4),
        (PRESENT, 16),
        (PRESENT, 32),
        ("max_batch_size 16", 32),
        ("max_batch_size 8", 32),
    ]
    assert {load for _, load in machine.measured[5:]} <= {32}


def test_where_the_present_settings_break_a_limit_a_variant_that_keeps_it_is_better(tune: Any) -> None:
    machine = Machine(speeds(), {4: 1, 16: 5, 32: 500})
    found = tune(machine, Goal(objective="latency", ttft=100), kv=10**6)
    assert found.recommended == Variant()
    machine.slow = PRESENT
    better = tune(machine, Goal(objective="latency", ttft=100), kv=10**6)
    assert better.recommended.changes == {"max_batch_size": 16}
    comparison = by_name(better)["max_batch_size 16"].comparison
    assert (comparison.present, comparison.gain) == ((0.0,) * 4, None)


def test_the_highest_load_is_narrowed_down(tune: Any) -> None:
    machine = Machine(speeds(), {32: 500.0, 31: 90.0})
    found = tune(machine, Goal(ttft=100), kv=10**6)
    assert found.highest_load.concurrency in (28, 30)
    assert machine.measured[:5] == [(PRESENT, load) for load in (4, 16, 32, 24, 28)]  # by one server
    assert machine.started[:2] == [PRESENT, "max_batch_size 16"]
    none = tune(Machine(speeds(), dict.fromkeys(range(33), 500.0)), Goal(ttft=100), kv=10**6)
    assert none.highest_load is None


def test_without_time_the_present_settings_stay(tune: Any) -> None:
    better = speeds(max_batch_size_at_8={32: 2600.0})
    machine = Machine(better, {})
    machine.ends_after = 7
    found = tune(machine, kv=10**6)
    assert found.recommended == Variant()
    assert by_name(found)["max_batch_size 8"].comparison.verdict == "too few repetitions"
    failing = Machine(better, {})
    failing.fails_after = 6
    failed = tune(failing, kv=10**6)
    assert by_name(failed)["max_batch_size 8"].comparison.verdict == "too few repetitions"
    assert by_name(failed)[PRESENT].failed == "present settings does not start"
    late = tune(Machine(better, {}), seconds=-1, kv=10**6)
    assert {trial.untried for trial in late.trials if trial.variant.changes} >= {NO_TIME}
    ended = Machine(better, {})
    ended.ends_after = 0
    with pytest.raises(ForgeError, match="the time ended before the first load was measured"):
        tune(ended)


def test_a_short_time_is_used(tune: Any) -> None:
    """Repetitions of what was measured are certain, those of what is not take no time away."""
    better = speeds(max_batch_size_at_8={32: 2600.0})
    machine = Machine(better, {})
    machine.seconds = 1
    found = tune(machine, seconds=20.5, kv=10**6)  # 4 for all loads of the present settings, 2 for each later server
    assert found.recommended.changes == {"max_batch_size": 8}
    assert len(by_name(found)["max_batch_size 8"].comparison.variant) == 3
    assert by_name(found)["max_num_tokens 1024"].untried == NO_TIME
    assert machine.clock == 20
    shorter = Machine(better, {})
    shorter.seconds = 1
    found = tune(shorter, seconds=9, kv=10**6)
    assert found.recommended == Variant()
    assert len(by_name(found)["max_batch_size 8"].points) == 1
    assert shorter.clock == 8


def test_a_second_variant_is_not_repeated_without_time_for_both(tune: Any) -> None:
    machine = Machine(speeds(max_batch_size_at_8={32: 2600.0}, max_batch_size_at_16={32: 2300.0}), {})
    machine.seconds = 1
    found = tune(machine, seconds=24.5, kv=10**6)
    assert found.recommended.changes == {"max_batch_size": 8}
    assert by_name(found)["max_batch_size 16"].comparison.verdict == "too few repetitions"


def test_a_variant_whose_server_fails_ends_only_its_own_repetitions(tune: Any) -> None:
    machine = Machine(speeds(max_batch_size_at_8={32: 2600.0}, max_batch_size_at_16={32: 2300.0}), {})
    machine.fails_after, machine.failing = 4, "max_batch_size 16"
    found = tune(machine, kv=10**6)
    assert found.recommended.changes == {"max_batch_size": 8}
    assert len(by_name(found)["max_batch_size 8"].comparison.variant) == 4
    assert by_name(found)["max_batch_size 16"].failed == "max_batch_size 16 does not start"


def test_a_variant_whose_server_failed_is_not_recommended(tune: Any) -> None:
    machine = Machine(speeds(max_batch_size_at_8={32: 2600.0}), {})
    machine.fails_after, machine.failing = 9, "max_batch_size 8"  # in the last repetition
    found = tune(machine, kv=10**6)
    assert by_name(found)["max_batch_size 8"].comparison.verdict == "better"
    assert found.recommended == Variant()


def test_what_was_found_is_kept_if_the_last_server_fails(tune: Any) -> None:
    machine = Machine(speeds(max_batch_size_at_8={28: 2600.0}), {32: 500.0})
    found = tune(machine, Goal(ttft=100), kv=10**6)
    assert found.recommended.changes == {"max_batch_size": 8}
    last = len(machine.started) - 1
    failing = Machine(machine.speeds, machine.first)
    failing.fails_after = last
    again = tune(failing, Goal(ttft=100), kv=10**6)
    assert (len(failing.started), again.recommended) == (last, found.recommended)
