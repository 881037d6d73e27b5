"""The measurement: the present settings, then each variant once, then the best and the present ones alternately."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from trtforge.core.errors import ForgeError, first_line
from trtforge.core.progress import Progress
from trtforge.core.serving import ServingConfig
from trtforge.serve.embedded import compile_kernels
from trtforge.serve.local_server import LocalServer
from trtforge.serve.speed import Load, Meter, requests_at
from trtforge.tune.choice import (
    LEAST_REPETITIONS,
    compare,
    finalists,
    highest_load,
    is_hopeless,
    load_between,
    next_level,
    winner,
)
from trtforge.tune.goal import Goal, Point
from trtforge.tune.result import NO_TIME, Trial
from trtforge.tune.servers import Workplace, kv_tokens
from trtforge.tune.variants import PRESENT, Limits, Variant, needless, variants

Measuring = Callable[[int], Point | None]
"""Measures a concurrency; None if the time ended before."""
_CLEARLY_WORSE = "clearly worse"


class Display(Progress, Protocol):
    """Progress bars, and a line during work without a bar."""

    def waiting(self, title: str) -> AbstractContextManager[None]:
        """Show `title`."""


@dataclass(frozen=True)
class Budget:
    """`until`: the end, by `time.monotonic`. `repetitions`: of the best variants and of the present settings."""

    until: float
    repetitions: int

    @property
    def left(self) -> float:
        """Remaining seconds."""
        return self.until - time.monotonic()


@dataclass(frozen=True)
class Found:
    """The results; see Tuning."""

    trials: tuple[Trial, ...]
    recommended: Variant
    highest_load: Point | None


@dataclass
class Tuner:
    """One run. `say` is called with a line for each measured load."""

    workplace: Workplace
    engine: Limits
    goal: Goal
    load: Load
    budget: Budget
    display: Display
    say: Callable[[str], None]
    _trials: dict[str, Trial] = field(default_factory=dict)
    _scores: dict[str, list[float]] = field(default_factory=dict)
    _kv_tokens: int | None = None
    _turn: float = 0.0
    """Duration in seconds of one server with one load, from its start to its end."""

    def run(self) -> Found:
        """Measure while the budget lasts. Raises ForgeError if not even one load of the present settings fits in the
        budget."""
        compile_kernels(self.workplace.packaged.facts)  # here, so that it is reported
        bar = self._present()
        for variant in variants(self._serving, self.engine, self.load):
            self._trials[variant.name] = self._screened(variant, bar)
        best = self._best(bar)
        if best:
            self._repeat(best)
        comparisons = {name: compare(self._scores.get(PRESENT, ()), self._scores.get(name, ())) for name in best}
        for name, comparison in comparisons.items():
            self._amend(name, comparison=comparison)
        recommended = winner({name: comparisons[name] for name in best if not self._trials[name].failed}) or PRESENT
        highest = self._highest(recommended) if self.goal.limited else None
        return Found(tuple(self._trials.values()), self._trials[recommended].variant, highest)

    @property
    def _serving(self) -> ServingConfig:
        return self.workplace.packaged.config.serving

    def _present(self) -> Point | None:
        """Measure all loads with the present settings; returns the best point."""
        start = time.monotonic()
        with self._server(Variant()) as (server, meter):
            self._kv_tokens = kv_tokens(server)
            ready = time.monotonic()
            self._trials[PRESENT] = self._rising(Variant(), meter, None)
            self._narrow(PRESENT, meter)
            measured = time.monotonic()
        points = self._trials[PRESENT].points
        if not points:
            raise ForgeError(
                "the time ended before the first load was measured",
                hint="Give more --time, or fewer --requests or shorter answers.",
            )
        self._turn = time.monotonic() - start - (measured - ready) * (1 - 1 / len(points))
        return self.goal.best(points)

    def _best(self, bar: Point | None) -> list[str]:
        """The measured variants that will be repeated."""
        measured = {name: trial.points for name, trial in self._trials.items() if name != PRESENT}
        return finalists(self.goal, bar, measured)

    def _kept_for_repetitions(self, bar: Point | None) -> float:
        """Seconds to reserve: for all repetitions if there is a finalist, else for the fewest repetitions of a later
        one.

        0 if there is no time for these; then only single measurements can be shown.
        """
        if self._best(bar):
            return 2 * self.budget.repetitions * self._turn
        fewest = 2 * LEAST_REPETITIONS * self._turn
        return fewest if self.budget.left >= self._turn + fewest else 0.0

    def _screened(self, variant: Variant, bar: Point | None) -> Trial:
        """Measure a variant once, if it can make a difference and there is time for it and for repetitions."""
        why = needless(variant, self._serving, self.engine, self.load, self._kv_tokens)
        if why is None and self.budget.left < self._turn + self._kept_for_repetitions(bar):
            why = NO_TIME
        if why is not None:
            return Trial(variant=variant, untried=why)
        try:
            with self._server(variant) as (_, meter):
                return self._rising(variant, meter, bar)
        except ForgeError as error:
            return Trial(variant=variant, untried=first_line(error))

    def _rising(self, variant: Variant, meter: Measuring, bar: Point | None) -> Trial:
        """Measure the loads chosen by `next_level` while time is left."""
        points: list[Point] = []
        levels = self.load.concurrency if self.goal.objective == "throughput" or bar is None else (bar.concurrency,)
        while (level := next_level(levels, points, self.goal, bar)) is not None:
            point = meter(level)
            if point is None:
                return Trial(variant=variant, points=tuple(points), untried=NO_TIME)
            points.append(point)
        early = bar is not None and is_hopeless(points, self.goal, bar)
        return Trial(variant=variant, points=tuple(points), untried=_CLEARLY_WORSE if early else "")

    def _repeat(self, best: list[str]) -> None:
        """Measure the best loads of the present settings and of `best` alternately, every second round in reverse
        order.

        A variant whose server fails is left out from then on; incomplete rounds do not count. The second variant is
        left out if there is no time for enough rounds with it. If all loads of the present settings break a limit, the
        goal's preferred load (highest for latency, lowest for throughput) is used.
        """
        if self.budget.left < LEAST_REPETITIONS * (1 + len(best)) * self._turn:
            best = best[:1]
        names = [PRESENT, *best]
        wanted = (max if self.goal.objective == "latency" else min)(self.load.concurrency)
        found = {name: self.goal.best(self._trials[name].points) for name in names}
        loads = {name: point.concurrency if point is not None else wanted for name, point in found.items()}
        for number in range(self.budget.repetitions):
            scores: dict[str, float] = {}
            for name in names if number % 2 == 0 else names[::-1]:
                if self.budget.left < self._turn:
                    return
                point = self._once(name, loads[name])
                if point is not None:
                    self._amend(name, points=(*self._trials[name].points, point))
                    scores[name] = self.goal.score(point)
                elif not self._trials[name].failed:
                    return
            names = [name for name in names if not self._trials[name].failed]
            if PRESENT not in names or len(names) == 1:
                return
            for name in names:
                self._scores.setdefault(name, []).append(scores[name])

    def _once(self, name: str, load: int) -> Point | None:
        """Measure once more; None if the time ended, or if the server failed, which is reported."""
        try:
            with self._server(self._trials[name].variant) as (_, meter):
                return meter(load)
        except ForgeError as error:
            self.say(f"{name}: {error.message}")
            self._amend(name, failed=first_line(error))
            return None

    def _highest(self, name: str) -> Point | None:
        """The highest load that keeps the limits, narrowed down while time is left."""
        if load_between(self._trials[name].points, self.goal) is not None and self.budget.left > self._turn:
            try:
                with self._server(self._trials[name].variant) as (_, meter):
                    self._narrow(name, meter)
            except ForgeError as error:  # earlier measurements are shown anyway
                self.say(f"{name}: {error.message}")
        points = self._trials[name].points
        load = highest_load(points, self.goal)
        return next((point for point in reversed(points) if point.concurrency == load), None)

    def _narrow(self, name: str, meter: Measuring) -> None:
        """Measure loads between the highest that keeps the limits and the lowest that breaks one."""
        while (level := load_between(self._trials[name].points, self.goal)) is not None:
            point = meter(level)
            if point is None:
                return
            self._amend(name, points=(*self._trials[name].points, point))

    def _amend(self, name: str, **changes: object) -> None:
        self._trials[name] = self._trials[name].model_copy(update=changes)

    @contextmanager
    def _server(self, variant: Variant) -> Iterator[tuple[LocalServer, Measuring]]:
        """Serve a variant."""
        with self.display.waiting(f"serving {variant.name}"), self.workplace.served(variant) as server:
            meter: Meter | None = None

            def measured(level: int) -> Point | None:
                nonlocal meter
                title = f"{variant.name}, {level} at once"
                with self.display.bar(title, requests_at(self.load, level), "requests") as bar:
                    meter = meter or Meter(server.grpc, self.workplace.model, self.load, self.workplace.tokenizer)
                    meter.done = lambda: bar.advance(1)
                    answers = meter.answers(level, self.budget.until)
                if answers is None:
                    return None
                point = Point.of(answers, self.goal.percentile)
                self.say(f"{variant.name}, {self.goal.said(point)}")
                return point

            yield server, measured
