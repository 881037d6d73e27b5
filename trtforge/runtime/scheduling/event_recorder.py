"""Records KV cache events. The block manager says which contents may have changed; the recorder compares."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from trtforge.core.recent import Recent
from trtforge.engine_process.retention import DEFAULT_RETENTION
from trtforge.runtime.scheduling.block_events import (
    DEVICE_LEVEL,
    HOST_LEVEL,
    KvCacheCreated,
    KvCacheEvent,
    KvCacheEventDiff,
    KvCacheRemoved,
    KvCacheStored,
    KvCacheStoredBlock,
    KvCacheUpdated,
)
from trtforge.runtime.scheduling.block_pool import BlockPool
from trtforge.runtime.scheduling.block_table import BlockTable
from trtforge.runtime.scheduling.host_pool import HostPool
from trtforge.runtime.scheduling.virtual_tokens import VIRTUAL


def block_hash(key: bytes) -> int:
    """The first 8 bytes of a block's key, little-endian."""
    return int.from_bytes(key[:8], "little")


class BlockObserver:
    """Receives the block manager's reports about contents; this class (for engines without events) ignores them."""

    def watch(self, pool: BlockPool, host: HostPool, tokens_per_block: int) -> None:
        """Observe these pools, which are empty, from now on."""

    def stored(self, table: BlockTable, keys: Sequence[bytes], tokens: Sequence[int], first: int = 0) -> None:
        """Report a sequence's blocks. Those from `first` on may be new, or on another cache level.

        `keys` and `tokens`: from the sequence's start.
        """

    def look(self, key: bytes | None) -> None:
        """Report that the content of `key` may have moved, changed its retention or been lost."""


@dataclass(slots=True)
class _Removals:
    """Contents lost one after another; they are one event until it is taken."""

    hashes: list[int] = field(default_factory=list)


_Data = KvCacheCreated | KvCacheStored | KvCacheUpdated | _Removals
_Place = tuple[int, int]
"""Cache level and priority of a content."""


class EventRecorder(BlockObserver):
    """Keeps the latest events. All but `take` and `close` on the engine's thread.

    As in TensorRT-LLM, it is no event when a priority falls back to the default after its duration; the block's next
    event has the new priority.
    """

    def __init__(self, count: int, *, window_size: int, vocab_size: int) -> None:
        """`count`: maximum number of events kept; `window_size`: see KvCacheEvent; `vocab_size`: the model's."""
        self._events: Recent[tuple[int, _Data]] = Recent(count)
        self._window_size, self._vocab_size = window_size, vocab_size
        self._next = 0
        self._places: dict[bytes, _Place] = {}
        """State of every content as last reported in an event."""

    def watch(self, pool: BlockPool, host: HostPool, tokens_per_block: int) -> None:
        """See BlockObserver."""
        self._pool, self._host, self._size = pool, host, tokens_per_block
        self._no_extra_ids = (0,) * tokens_per_block
        host.on_overwritten = self.look
        self._add(KvCacheCreated((pool.count, host.count)))

    def stored(self, table: BlockTable, keys: Sequence[bytes], tokens: Sequence[int], first: int = 0) -> None:
        """See BlockObserver. Successive new blocks are one event."""
        new: list[KvCacheStoredBlock] = []
        for index in range(first, len(keys)):
            key = keys[index]
            place = None if key in self._places else self._place(key)
            if place is None:
                self._add_stored(keys, index, new)
                new = []
                self.look(key)
            else:
                self._places[key] = place
                new.append(self._block(table, key, tokens, index, place))
        self._add_stored(keys, len(keys), new)

    def look(self, key: bytes | None) -> None:
        """See BlockObserver."""
        before = None if key is None else self._places.get(key)
        if key is None or before is None:
            return
        now = self._place(key)
        if now is None:
            del self._places[key]
            self._remove(block_hash(key))
        elif now != before:
            self._places[key] = now
            diffs = [None if old == new else KvCacheEventDiff(old, new) for old, new in zip(before, now, strict=True)]
            self._add(KvCacheUpdated(block_hash(key), *diffs))

    def take(self, timeout: float | None) -> list[KvCacheEvent]:
        """The events since the last call, the oldest first; see `Recent.take`. On any thread."""
        return [
            KvCacheEvent(
                number, KvCacheRemoved(tuple(data.hashes)) if isinstance(data, _Removals) else data, self._window_size
            )
            for number, data in self._events.take(timeout)
        ]

    def close(self) -> None:
        """Wake waiting callers of `take`. May be called again."""
        self._events.close()

    def _place(self, key: bytes) -> _Place | None:
        block = self._pool.find(key)
        if block is not None:
            level, kept = DEVICE_LEVEL, self._pool.order.retention(block)
        elif self._host.holds(key):
            level, kept = HOST_LEVEL, self._host.order.retention(key)
        else:
            return None
        return level, DEFAULT_RETENTION if kept is None else kept.priority

    def _block(
        self, table: BlockTable, key: bytes, tokens: Sequence[int], index: int, place: _Place
    ) -> KvCacheStoredBlock:
        ids, extra_ids = tuple(tokens[index * self._size : (index + 1) * self._size]), self._no_extra_ids
        if max(ids) >= VIRTUAL:
            extra_ids = tuple(max(0, token - VIRTUAL) for token in ids)
            ids = tuple(min(token, self._vocab_size) for token in ids)
        return KvCacheStoredBlock(block_hash(key), ids, extra_ids, table.lora_id, *place)

    def _add_stored(self, keys: Sequence[bytes], end: int, blocks: list[KvCacheStoredBlock]) -> None:
        """Add an event for the `blocks` before the one at `end`."""
        if blocks:
            first = end - len(blocks)
            self._add(KvCacheStored(block_hash(keys[first - 1]) if first else None, tuple(blocks)))

    def _remove(self, removed: int) -> None:
        def joins(newest: tuple[int, _Data]) -> bool:
            removals = newest[1]
            if not isinstance(removals, _Removals):
                return False
            removals.hashes.append(removed)
            return True

        if not self._events.change_newest(joins):
            self._add(_Removals([removed]))

    def _add(self, data: _Data) -> None:
        self._events.add((self._next, data))
        self._next += 1
