"""The goal of tuning, and how a measured load is judged by it."""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.serve.speed import Answers

Objective = Literal["throughput", "latency"]


class Point(Config, allow_inf_nan=False):
    """One measured load. Times in milliseconds at the goal's percentile of the requests; `answer_ms`: whole answers."""

    concurrency: int
    requests: int
    tokens_per_second: float
    first_text_ms: float
    next_token_ms: float
    answer_ms: float

    @classmethod
    def of(cls, answers: Answers, percentile: float) -> "Point":
        """The point of all answers at one level."""
        level = answers.level
        return cls(
            concurrency=level.concurrency,
            requests=level.requests,
            tokens_per_second=level.tokens_per_second,
            first_text_ms=round(at_percentile(answers.first_text_ms, percentile), 2),
            next_token_ms=round(at_percentile(answers.next_token_ms, percentile), 3),
            answer_ms=round(at_percentile(answers.answer_ms, percentile), 2),
        )


class Goal(Config, allow_inf_nan=False):
    """The goal. Throughput: the most tokens per second within the limits; latency: the shortest whole answers."""

    objective: Objective = "throughput"
    ttft: float | None = Field(None, gt=0, description="Limit of the time to the first text, in milliseconds.")
    token_latency: float | None = Field(None, gt=0, description="Limit of the time of each further token.")
    percentile: float = Field(95, gt=0, le=100)

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self.ttft is not None or self.token_latency is not None

    @property
    def words(self) -> str:
        """The goal as text."""
        limits = [("first text", self.ttft), ("each further token", self.token_latency)]
        kept = [f"{name} within {limit:g} ms" for name, limit in limits if limit is not None]
        main = "most tokens per second" if self.objective == "throughput" else "shortest answers at the highest load"
        return ", ".join([main, *kept]) + f"; times at p{self.percentile:g}"

    def keeps(self, point: Point) -> bool:
        """Whether the point keeps the limits."""
        return (self.ttft is None or point.first_text_ms <= self.ttft) and (
            self.token_latency is None or point.next_token_ms <= self.token_latency
        )

    def score(self, point: Point) -> float:
        """The score, more is better: tokens or answers per second; 0 if the point breaks a limit."""
        if not self.keeps(point):
            return 0.0
        return point.tokens_per_second if self.objective == "throughput" else 1e3 / point.answer_ms

    def said(self, point: Point) -> str:
        """The figures of a point as text."""
        times = f"first text {point.first_text_ms:,.0f} ms, each further token {point.next_token_ms:,.1f} ms"
        broken = "" if self.keeps(point) else " (over a limit)"
        return f"{point.concurrency} at once: {point.tokens_per_second:,.0f} tokens/s, {times}{broken}"

    def best(self, points: Sequence[Point]) -> Point | None:
        """The best point. For latency it is the one with the highest load, since lower concurrency is always faster.

        None if that point, or for throughput all points, break a limit.
        """
        if not points:
            return None
        if self.objective == "latency":
            found = max(points, key=lambda point: point.concurrency)
        else:
            found = max(points, key=self.score)
        return found if self.score(found) else None


def at_percentile(values: Sequence[float], percentile: float) -> float:
    """The smallest of `values` that this percentage of them does not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(percentile / 100 * len(values)) - 1)]
