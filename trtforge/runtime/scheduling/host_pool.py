"""Which host-memory blocks contain KV blocks that left the device. A step's copies move the contents.

Like TensorRT-LLM's secondary pool (`kv_cache_host_memory_bytes`; cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp):
content evicted from the device is copied to the host, and back when a prompt starts with its tokens.
"""

from collections.abc import Callable

from trtforge.engine_process.retention import DEFAULT_RETENTION
from trtforge.runtime.scheduling.block_pool import BlockPool
from trtforge.runtime.scheduling.eviction import EvictionOrder
from trtforge.runtime.scheduling.retention import Retention

OFFLOAD_MIN_PRIORITY = 30
"""Contents of a lower priority are not copied to the host: TensorRT-LLM's default `secondary_offload_min_priority`."""


class HostPool:
    """Blocks numbered from `first` on. The oldest content of the lowest priority is overwritten first.

    Content that returns to the device frees its block for the content that it displaces there, so nothing is lost.
    `onboarded`: how often content went back. `on_overwritten` gets the key of content that was overwritten.
    """

    def __init__(self, first: int, count: int) -> None:
        self.count = count
        self.onboarded = 0
        self.on_overwritten: Callable[[bytes], None] = lambda key: None
        self._empty = list(range(first + count - 1, first - 1, -1))
        self._block_of: dict[bytes, int] = {}
        self.order: EvictionOrder[bytes] = EvictionOrder()

    @property
    def used(self) -> int:
        """Number of blocks with content."""
        return len(self._block_of)

    def holds(self, key: bytes) -> bool:
        """Whether a block has the content of `key`."""
        return key in self._block_of

    def refresh(self, key: bytes) -> bool:
        """Make the content of `key` the newest; returns whether it is in the pool."""
        if key in self._block_of:
            self.order.remove(key)
            self.order.add(key)
        return key in self._block_of

    def retain(self, key: bytes, retention: Retention) -> None:
        """Set the retention of the content of `key`, if it is in the pool."""
        if key in self._block_of:
            self.order.retain(key, retention)

    def take(self, key: bytes) -> tuple[int, Retention | None] | None:
        """Free and return the block with the content of `key`, with its retention; None if there is none.

        The caller must read the block before it is written again.
        """
        found = self._removed(key)
        self.onboarded += found is not None
        return found

    def discard(self, key: bytes, copies: dict[int, int]) -> Retention | None:
        """Free the block with the content of `key`, if any, because the device has it again. Returns its retention.

        `copies`: the next step's copies, source by target; a copy to the freed block is dropped.
        """
        found = self._removed(key)
        if found is None:
            return None
        copies.pop(found[0], None)
        return found[1]

    def _removed(self, key: bytes) -> tuple[int, Retention | None] | None:
        block = self._block_of.pop(key, None)
        if block is None:
            return None
        self._empty.append(block)
        self.order.remove(key)
        return block, self.order.forget(key)

    def place(self, key: bytes, retention: Retention | None = None) -> int | None:
        """A block to copy the content of `key` to; None if a block already has it or its priority is too low."""
        priority = DEFAULT_RETENTION if retention is None else retention.priority
        if self.refresh(key):
            if retention is not None:
                self.order.retain(key, retention)
            return None
        if priority < OFFLOAD_MIN_PRIORITY:
            return None
        if self._empty:
            block = self._empty.pop()
        elif self._block_of and self.order.lowest <= priority:
            oldest, _ = self.order.pop()
            block = self._block_of.pop(oldest)
            self.on_overwritten(oldest)
        else:
            return None
        self._block_of[key] = block
        self.order.retain(key, retention)
        self.order.add(key)
        return block

    def check(self, device: BlockPool) -> None:
        """Assert every invariant. `device`: has none of these contents."""
        assert all(device.find(key) is None for key in self._block_of), "content is in both memories"
        assert set(self.order) == set(self._block_of), "content is held that cannot be overwritten"
        blocks = [*self._empty, *self._block_of.values()]
        assert len(set(blocks)) == len(blocks) == self.count, "a block of the host leaked, or has two contents"
        self.order.check()
