"""Eviction order of contents that no request uses: the lowest retention priority first, then the oldest.

Like TensorRT-LLM's LRUEvictionPolicy (cpp/tensorrt_llm/batch_manager/evictionPolicy.cpp): one queue per priority.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import chain
from time import monotonic
from typing import Generic, TypeVar

from trtforge.engine_process.retention import DEFAULT_RETENTION, HIGHEST_RETENTION
from trtforge.runtime.scheduling.retention import Retention

Item = TypeVar("Item", int, bytes)
Clock = Callable[[], float]
_FEW_EXPIRIES = 64


class EvictionOrder(Generic[Item]):
    """The free items in eviction order, and the retention of each item's content, free or not.

    Every operation takes constant time, or logarithmic time if contents have a duration.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self.clock = clock
        self._queues: list[OrderedDict[Item, None]] = [OrderedDict() for _ in range(HIGHEST_RETENTION + 1)]
        self._default: OrderedDict[Item, None] = self._queues[DEFAULT_RETENTION]
        self._priority_of: dict[Item, int] = {}
        """Priority of each free item that is not in the default queue."""
        self._filled = 0
        """Bit p is set if the queue of priority p, other than the default, has items."""
        self._retention: dict[Item, Retention] = {}
        """Retention of each item whose priority is not the default."""
        self._expiries: list[tuple[float, Item]] = []
        """A heap; entries of items that were used or evicted since then are out of date."""

    def __len__(self) -> int:
        return len(self._default) + len(self._priority_of)

    def __contains__(self, item: object) -> bool:
        return item in self._default or item in self._priority_of

    def __iter__(self) -> Iterator[Item]:
        return chain(self._default, self._priority_of)

    @property
    def lowest(self) -> int:
        """The lowest priority of the free items; there must be at least one."""
        self._expire()
        filled = self._filled | (1 << DEFAULT_RETENTION if self._default else 0)
        return (filled & -filled).bit_length() - 1

    def add(self, item: Item) -> None:
        """Make the item free; within its priority it is evicted last."""
        if self._expiries:
            self._expire()
        kept = self._retention.get(item)
        if kept is None:
            self._default[item] = None
            return
        if kept.seconds is not None:
            if kept.until is None:
                self._retention[item] = kept = replace(kept, until=self.clock() + kept.seconds)
            assert kept.until is not None
            self._remind(kept.until, item)
        self._queues[kept.priority][item] = None
        self._priority_of[item] = kept.priority
        self._filled |= 1 << kept.priority

    def remove(self, item: Item) -> bool:
        """Make the item not free; it keeps its priority. Returns whether it was free."""
        if not self._unlink(item):
            return False
        kept = self._retention.get(item)
        if kept is not None and kept.until is not None:
            self._retention[item] = replace(kept, until=None)
        return True

    def pop(self) -> tuple[Item, Retention | None]:
        """Evict and forget the first item; returns it and its retention, None for the default."""
        if not self._priority_of:
            item, _ = self._default.popitem(last=False)
            return item, None
        item = next(iter(self._queues[self.lowest]))
        return item, self.forget(item)

    def forget(self, item: Item) -> Retention | None:
        """Forget an item whose content is lost; returns its retention."""
        self._unlink(item)
        return self._retention.pop(item, None)

    def retain(self, item: Item, retention: Retention | None) -> None:
        """Set the item's retention, None for the default. A free item becomes the last of its priority."""
        was_free = self.remove(item)
        if retention is None or retention.priority == DEFAULT_RETENTION:
            self._retention.pop(item, None)
        else:
            self._retention[item] = retention
        if was_free:
            self.add(item)

    def retention(self, item: Item) -> Retention | None:
        """The item's retention; None for the default."""
        return self._retention.get(item)

    @property
    def kept(self) -> Iterable[Item]:
        """The items whose priority is not the default, free or not."""
        return self._retention.keys()

    def check(self) -> None:
        """Assert every invariant."""
        for priority, queue in enumerate(self._queues):
            found = bool(queue) and priority != DEFAULT_RETENTION
            assert found == bool(self._filled >> priority & 1), "the priorities with free items are wrong"
            for item in queue:
                assert self._priority_of.get(item, DEFAULT_RETENTION) == priority, "a free item has another priority"
        assert sum(map(len, self._queues)) == len(self), "a free item is in no queue"
        assert all(kept.priority != DEFAULT_RETENTION for kept in self._retention.values()), "a default is stored"
        times = {item: kept.until for item, kept in self._retention.items()}
        assert all(
            (time, item) in self._expiries for item, time in times.items() if time is not None and item in self
        ), "a duration never ends"

    def _unlink(self, item: Item) -> bool:
        """Take an item out of its queue; returns whether it was in one."""
        if item in self._default:
            del self._default[item]
            return True
        priority = self._priority_of.pop(item, None)
        if priority is None:
            return False
        queue = self._queues[priority]
        del queue[item]
        if not queue:
            self._filled &= ~(1 << priority)
        return True

    def _expire(self) -> None:
        """Give items whose duration has passed the default priority; they are evicted last, in order of expiry.

        TensorRT-LLM does this once per iteration (`refreshBlocks`), this class before each use of the order.
        """
        now = self.clock() if self._expiries else 0.0
        while self._expiries and self._expiries[0][0] <= now:
            time, item = heappop(self._expiries)
            kept = self._retention.get(item)
            if kept is not None and kept.until == time and item in self._priority_of:
                self.forget(item)
                self._default[item] = None

    def _remind(self, time: float, item: Item) -> None:
        heappush(self._expiries, (time, item))
        if len(self._expiries) > _FEW_EXPIRIES + 2 * len(self._retention):
            times = ((kept.until, each) for each, kept in self._retention.items())
            self._expiries = [(until, each) for until, each in times if until is not None]
            heapify(self._expiries)
