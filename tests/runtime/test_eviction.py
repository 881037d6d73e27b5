"""The order in which cached contents are given up."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trtforge.engine_process.retention import DEFAULT_RETENTION, KvCacheRetention, TokenRangeRetention, wrong_retention
from trtforge.runtime.scheduling.block_pool import BlockPool
from trtforge.runtime.scheduling.eviction import EvictionOrder
from trtforge.runtime.scheduling.host_pool import HostPool
from trtforge.runtime.scheduling.retention import Retention, SequenceRetention


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def emptied(order: EvictionOrder[int]) -> list[int]:
    return [order.pop()[0] for _ in range(len(order))]


def test_the_lowest_priority_goes_first_and_in_one_the_oldest() -> None:
    order: EvictionOrder[int] = EvictionOrder()
    order.retain(1, Retention(80))
    order.retain(4, Retention(0))
    order.retain(5, Retention(100))
    order.retain(6, Retention(0))
    for item in (5, 1, 2, 3, 4, 6):
        order.add(item)
    assert order.lowest == 0
    order.check()
    assert emptied(order) == [4, 6, 2, 3, 1, 5]
    assert list(order.kept) == []


def test_an_item_that_was_used_again_keeps_its_priority_and_is_the_newest_of_it() -> None:
    order: EvictionOrder[int] = EvictionOrder()
    order.retain(1, Retention(80))
    for item in (1, 2, 3):
        order.add(item)
    order.retain(3, Retention(80))
    assert order.remove(1)
    assert not order.remove(1)
    order.add(1)
    order.retain(2, Retention(DEFAULT_RETENTION))
    assert emptied(order) == [2, 3, 1]


def test_a_priority_ends_with_its_duration_which_begins_when_nobody_uses_the_content() -> None:
    time = Time()
    order: EvictionOrder[int] = EvictionOrder(time)
    order.retain(1, Retention(80, 10.0))
    order.retain(2, Retention(0, 20.0))
    time.now += 1000
    order.add(1)
    order.add(2)
    order.add(3)
    time.now += 9.5
    assert order.lowest == 0
    order.remove(1)
    time.now += 1000
    assert order.lowest == DEFAULT_RETENTION, "item 2 counts as by default"
    order.add(1)
    time.now += 9.5
    assert order.retention(1) is not None
    time.now += 1
    order.add(4)
    assert order.retention(1) is None
    assert emptied(order) == [3, 2, 1, 4]


def test_what_moves_keeps_the_time_that_is_left() -> None:
    time = Time()
    order: EvictionOrder[int] = EvictionOrder(time)
    order.retain(1, Retention(80, 10.0))
    order.add(1)
    time.now += 6
    item, kept = order.pop()
    assert (item, kept) == (1, Retention(80, 10.0, 110.0))
    order.retain(7, kept)
    order.add(7)
    time.now += 5
    order.add(8)
    assert emptied(order) == [7, 8]


def test_ends_of_durations_are_not_collected_for_ever() -> None:
    order: EvictionOrder[int] = EvictionOrder()
    order.retain(1, Retention(80, 3600.0))
    for _ in range(1000):
        order.add(1)
        order.remove(1)
    assert len(order._expiries) < 100
    order.check()


class Eviction(RuleBasedStateMachine):
    """An EvictionOrder against a list of free items in the order of their last use."""

    def __init__(self) -> None:
        super().__init__()
        self.time = Time()
        self.order: EvictionOrder[int] = EvictionOrder(self.time)
        self.free: list[int] = []
        self.kept: dict[int, tuple[int, float | None]] = {}
        self.ends: dict[int, float] = {}

    @rule(item=st.integers(0, 9))
    def add(self, item: int) -> None:
        if item in self.free:
            return
        self.free.append(item)
        seconds = self.kept.get(item, (0, None))[1]
        if seconds is not None:
            self.ends[item] = self.time.now + seconds
        self.order.add(item)

    @rule(item=st.integers(0, 9))
    def remove(self, item: int) -> None:
        assert self.order.remove(item) == (item in self.free)
        if item in self.free:
            self.free.remove(item)
            self.ends.pop(item, None)

    @rule(item=st.integers(0, 9), priority=st.sampled_from((0, 34, 35, 36, 100)), seconds=st.none() | st.integers(0, 5))
    def retain(self, item: int, priority: int, seconds: int | None) -> None:
        self.order.retain(item, Retention(priority, seconds))
        self.kept.pop(item, None)
        self.ends.pop(item, None)
        if priority != DEFAULT_RETENTION:
            self.kept[item] = priority, seconds
        if item in self.free:
            self.free.remove(item)
            self.free.append(item)
            if item in self.kept and seconds is not None:
                self.ends[item] = self.time.now + seconds

    @rule(item=st.integers(0, 9))
    def forget(self, item: int) -> None:
        self.order.forget(item)
        self._lose(item)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        """Time passes in small steps, so that what ends is looked at in the order of its ends."""
        self.time.now += seconds

    @precondition(lambda self: self.free)
    @rule()
    def pop(self) -> None:
        first = min(
            self.free, key=lambda item: (self.kept.get(item, (DEFAULT_RETENTION, None))[0], self.free.index(item))
        )
        assert self.order.pop()[0] == first
        self._lose(first)

    @invariant()
    def agrees(self) -> None:
        for end, item in sorted((end, item) for item, end in self.ends.items() if end <= self.time.now):
            assert end
            self.free.remove(item)
            self.free.append(item)
            del self.kept[item], self.ends[item]
        if self.free:
            assert self.order.lowest == min(self.kept.get(item, (DEFAULT_RETENTION, None))[0] for item in self.free)
        assert sorted(self.order) == sorted(self.free)
        assert sorted(self.order.kept) == sorted(self.kept)
        self.order.check()

    def _lose(self, item: int) -> None:
        if item in self.free:
            self.free.remove(item)
        self.kept.pop(item, None)
        self.ends.pop(item, None)


TestEviction = Eviction.TestCase
TestEviction.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_host_keeps_what_has_a_higher_priority_than_what_comes() -> None:
    pool = HostPool(10, 2)
    assert [pool.place(b"a", Retention(90)), pool.place(b"b", Retention(60))] == [10, 11]
    assert pool.place(b"c") is None, "35 is lower than both"
    assert pool.place(b"d", Retention(60)) == 11
    assert pool.place(b"e", Retention(29)) is None, "what is below 30 is not copied to the host"
    assert pool.take(b"a") == (10, Retention(90))
    assert pool.place(b"e", Retention(29)) is None
    assert pool.place(b"f", Retention(30)) == 10
    assert pool.place(b"f", Retention(70)) is None, "it is there, and has its new priority from now on"
    assert pool.order.retention(b"f") == Retention(70)
    assert pool.place(b"f") is None
    assert pool.order.retention(b"f") == Retention(70)
    pool.retain(b"d", Retention(10))
    assert pool.place(b"g", Retention(30)) == 11
    assert [pool.holds(key) for key in (b"d", b"f", b"g")] == [False, True, True]
    pool.check(BlockPool(1))


def said(ranges: Sequence[TokenRangeRetention], prompt: int, size: int, first: int) -> int | None:
    """The priority of a block, read from a list of all tokens' priorities. Generated ones have 1."""
    tokens: list[int | None] = [None] * prompt
    for each in ranges:
        for token in range(each.start, min(prompt, each.end if each.end is not None else prompt)):
            tokens[token] = each.priority
    return tokens[first] if first < prompt else 1


@settings(max_examples=200, deadline=None)
@given(
    borders=st.lists(st.integers(0, 60), min_size=0, max_size=10, unique=True),
    open_end=st.booleans(),
    prompt=st.integers(1, 50),
    size=st.integers(1, 9),
    order=st.randoms(),
)
def test_the_range_of_its_first_token_says_how_long_a_block_is_kept(
    borders: list[int], open_end: bool, prompt: int, size: int, order: Random
) -> None:
    pairs = list(zip(sorted(borders)[::2], sorted(borders)[1::2], strict=False))
    ranges = [TokenRangeRetention(start, end, 40 + index) for index, (start, end) in enumerate(pairs)]
    if open_end and ranges:
        ranges[-1] = TokenRangeRetention(ranges[-1].start, None, 99)
    order.shuffle(ranges)
    setting = KvCacheRetention(ranges, decode_priority=1)
    assert wrong_retention(setting) is None
    found = SequenceRetention.of(setting, prompt)
    for first in range(0, prompt + 2 * size, size):
        kept = found.of_block(first)
        assert (None if kept is None else kept.priority) == said(ranges, prompt, size, first)


def test_durations_are_milliseconds() -> None:
    setting = KvCacheRetention([TokenRangeRetention(0, 4, 80, 1500)], decode_priority=20, decode_duration_ms=0)
    found = SequenceRetention.of(setting, 8)
    assert found.of_block(0) == Retention(80, 1.5)
    assert found.of_block(4) is None
    assert found.of_block(8) == Retention(20, 0.0)


@pytest.mark.parametrize(
    ("setting", "name", "problem"),
    [
        (
            KvCacheRetention([TokenRangeRetention(0, 4, 101)]),
            "priority",
            "is 101; it must be a whole number from 0 to 100",
        ),
        (
            KvCacheRetention([TokenRangeRetention(0, 4, -1)]),
            "priority",
            "is -1; it must be a whole number from 0 to 100",
        ),
        (KvCacheRetention([TokenRangeRetention(-1, 4)]), "start", "is -1; it must be at least 0"),
        (
            KvCacheRetention([TokenRangeRetention(4, 4)]),
            "end",
            "is 4; it must be greater than the start of its range, 4",
        ),
        (KvCacheRetention([TokenRangeRetention(0, 4, 50, -2)]), "duration_ms", "is -2; it must be at least 0"),
        (
            KvCacheRetention([TokenRangeRetention(60, 80), TokenRangeRetention(0, 64)]),
            "start",
            "is 60, in the range from 0 to 64; ranges must not overlap",
        ),
        (
            KvCacheRetention([TokenRangeRetention(0), TokenRangeRetention(30, 50)]),
            "start",
            "is 30, in the range from 0 to the prompt's end; ranges must not overlap",
        ),
        (KvCacheRetention((), 101), "decode_priority", "is 101; it must be a whole number from 0 to 100"),
        (KvCacheRetention((), 35, -1), "decode_duration_ms", "is -1; it must be at least 0"),
        (
            KvCacheRetention([TokenRangeRetention(each, each + 1) for each in range(1025)]),
            "ranges",
            "has 1025 ranges; at most 1024 are read",
        ),
    ],
)
def test_a_wrong_value_is_named(setting: KvCacheRetention, name: str, problem: str) -> None:
    wrong = wrong_retention(setting)
    assert wrong is not None
    assert (wrong.name, wrong.problem) == (name, problem)


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 64), (90, 128)],
        [(0, None)],
        [(50, 100), (30, 40)],
        [(0, 30), (30, 50), (60, 80)],
    ],
)
def test_what_tensorrt_llm_calls_valid_is_valid(ranges: list[tuple[int, int | None]]) -> None:
    assert wrong_retention(KvCacheRetention([TokenRangeRetention(*each) for each in ranges])) is None
