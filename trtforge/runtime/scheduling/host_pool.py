"""KV blocks that left the device: which blocks of host memory hold them. A step's copies move the contents.

As TensorRT-LLM's secondary pool (`kv_cache_host_memory_bytes`; cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp):
content that has to make room on the device is copied to the host, and back when a prompt starts with its tokens.
"""

from collections.abc import Callable

from trtforge.engine_process.retention import DEFAULT_RETENTION
from trtforge.runtime.scheduling.block_pool import BlockPool
from trtforge.runtime.scheduling.eviction import EvictionOrder
from trtforge.runtime.scheduling.retention import Retention

OFFLOAD_MIN_PRIORITY = 30
"""Contents of a lower priority are not copied to the host: TensorRT-LLM's default `secondary_offload_min_priority`."""


class HostPool:
    """Blocks numbered from `first` on. Of the lowest priority what was placed longest ago is overwritten first.

    Content that goes back leaves its block to what makes room for it, so that both pools together lose nothing.
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
        """Blocks with content."""
        return len(self._block_of)

    def holds(self, key: bytes) -> bool:
        """Whether a block has the content of `key`."""
        return key in self._block_of

    def refresh(self, key: bytes) -> bool:
        """Make the content of `key` the newest; whether it is there."""
        if key in self._block_of:
            self.order.remove(key)
            self.order.add(key)
        return key in self._block_of

    def retain(self, key: bytes, retention: Retention) -> None:
        """Keep the content of `key` so from now on, if it is there."""
        if key in self._block_of:
            self.order.retain(key, retention)

    def take(self, key: bytes) -> tuple[int, Retention | None] | None:
        """The block with the content of `key`, and how long that is kept; None if there is none.

        The block is free from now on: the caller reads it before it is written.
        """
        found = self._removed(key)
        self.onboarded += found is not None
        return found

    def discard(self, key: bytes, copies: dict[int, int]) -> Retention | None:
        """Free the block with the content of `key`, if there is one: the device has it anew. How long that is kept.

        `copies`: those of the next step, source by target; one to the block is dropped.
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
        """A block to copy the content of `key` to; None if one has it already, or if there is none for its priority."""
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
        """Assert every invariant. `device`: whose contents are others."""
        assert all(device.find(key) is None for key in self._block_of), "content is in both memories"
        assert set(self.order) == set(self._block_of), "content is held that cannot be overwritten"
        blocks = [*self._empty, *self._block_of.values()]
        assert len(set(blocks)) == len(blocks) == self.count, "a block of the host leaked, or has two contents"
        self.order.check()
