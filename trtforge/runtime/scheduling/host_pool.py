"""KV blocks that left the device: which blocks of host memory hold them. A step's copies move the contents.

As TensorRT-LLM's secondary pool (`kv_cache_host_memory_bytes`; cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp):
content that has to make room on the device is copied to the host, and back when a prompt starts with its tokens.
"""

from collections import OrderedDict


class HostPool:
    """Blocks numbered from `first` on. What was placed longest ago is overwritten first.

    Content that goes back leaves its block to what makes room for it, so that both pools together lose nothing.
    `onboarded`: how often content went back.
    """

    def __init__(self, first: int, count: int) -> None:
        self.count = count
        self.onboarded = 0
        self._empty = list(range(first + count - 1, first - 1, -1))
        self._block_of: OrderedDict[bytes, int] = OrderedDict()

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
            self._block_of.move_to_end(key)
        return key in self._block_of

    def take(self, key: bytes) -> int | None:
        """The block with the content of `key`, which is free from now on: the caller reads it before it is written."""
        block = self._block_of.pop(key, None)
        if block is not None:
            self._empty.append(block)
            self.onboarded += 1
        return block

    def place(self, key: bytes) -> int | None:
        """A block to copy the content of `key` to; None if one has it already, or if the pool has no blocks."""
        if self.refresh(key):
            return None
        if self._empty:
            block = self._empty.pop()
        elif self._block_of:
            _, block = self._block_of.popitem(last=False)
        else:
            return None
        self._block_of[key] = block
        return block
