"""How long a request's KV blocks are kept for later ones: TensorRT-LLM's `KvCacheRetentionConfig`. Needs no torch.

Names, ranges and checks are those of cpp/tensorrt_llm/executor/kvCacheRetentionConfig.cpp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

DEFAULT_RETENTION = 35
HIGHEST_RETENTION = 100
MOST_RETENTION_RANGES = 1024
"""Ranges of one request."""
LONGEST_SALT = 1024
"""Characters of a `cache_salt`."""


@dataclass(frozen=True, slots=True)
class TokenRangeRetention:
    """The tokens of a prompt from `start` to before `end` (None: to the prompt's end).

    `priority`: from 0 to 100, 35 by default; blocks of a lower priority are evicted first. `duration_ms`: milliseconds,
    counted from when no request uses a block any more, after which the priority is 35 again; None: never.
    """

    start: int
    end: int | None = None
    priority: int = DEFAULT_RETENTION
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class KvCacheRetention:
    """Priorities of the ranges of a prompt's tokens, and of the tokens that are generated."""

    ranges: Sequence[TokenRangeRetention] = ()
    decode_priority: int = DEFAULT_RETENTION
    decode_duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class WrongRetention:
    """A value that is refused: the name of its field, and what is wrong with it."""

    name: str
    problem: str


def wrong_retention(retention: KvCacheRetention) -> WrongRetention | None:
    """The first value of a retention that is refused, under one of its own names; None if there is none."""
    if len(retention.ranges) > MOST_RETENTION_RANGES:
        return WrongRetention("ranges", f"has {len(retention.ranges)} ranges; at most {MOST_RETENTION_RANGES} are read")
    for each in retention.ranges:
        wrong = _wrong_range(each)
        if wrong is not None:
            return wrong
    ordered = sorted(retention.ranges, key=lambda each: each.start)
    for before, after in pairwise(ordered):
        if before.end is None or before.end > after.start:
            end = "the prompt's end" if before.end is None else before.end
            return WrongRetention(
                "start", f"is {after.start}, in the range from {before.start} to {end}; ranges must not overlap"
            )
    return _wrong_priority("decode_priority", retention.decode_priority) or _wrong_duration(
        "decode_duration_ms", retention.decode_duration_ms
    )


def _wrong_range(given: TokenRangeRetention) -> WrongRetention | None:
    if given.start < 0:
        return WrongRetention("start", f"is {given.start}; it must be at least 0")
    if given.end is not None and given.end <= given.start:
        return WrongRetention("end", f"is {given.end}; it must be greater than the start of its range, {given.start}")
    return _wrong_priority("priority", given.priority) or _wrong_duration("duration_ms", given.duration_ms)


def _wrong_priority(name: str, priority: int) -> WrongRetention | None:
    if not 0 <= priority <= HIGHEST_RETENTION:
        return WrongRetention(name, f"is {priority}; it must be a whole number from 0 to {HIGHEST_RETENTION}")
    return None


def _wrong_duration(name: str, duration: int | None) -> WrongRetention | None:
    if duration is not None and duration < 0:
        return WrongRetention(name, f"is {duration}; it must be at least 0")
    return None


def retention_row(retention: KvCacheRetention) -> list[Any]:
    """A retention as JSON values."""
    ranges = [[each.start, each.end, each.priority, each.duration_ms] for each in retention.ranges]
    return [ranges, retention.decode_priority, retention.decode_duration_ms]


def retention_of_row(row: Sequence[Any]) -> KvCacheRetention:
    """The inverse of `retention_row`. Raises TypeError and ValueError."""
    ranges, priority, duration = row
    return KvCacheRetention(tuple(TokenRangeRetention(*each) for each in ranges), priority, duration)
