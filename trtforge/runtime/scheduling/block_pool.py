"""The blocks of one device: how many sequences hold each, what the full ones contain, and which is overwritten next."""

from trtforge.runtime.scheduling.eviction import EvictionOrder
from trtforge.runtime.scheduling.retention import Retention


class BlockPool:
    """Reference-counted blocks. A free block whose content has a key keeps it until no empty block is left.

    `taken`: how often a block was taken; `taken_empty`: how often it had no content that others could have shared.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = self.taken_empty = 0
        self.order: EvictionOrder[int] = EvictionOrder()
        """Eviction order of free blocks with content, and how long contents are kept."""
        self.references = [0] * count
        self._empty = list(range(count - 1, -1, -1))
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Number of blocks that no sequence holds, those with content included."""
        return len(self._empty) + len(self.order)

    @property
    def used(self) -> int:
        """Number of blocks that some sequence holds."""
        return self.count - self.free

    def find(self, key: bytes) -> int | None:
        """The block with the content of `key`; None if there is none."""
        return self._block_of.get(key)

    def key_of(self, block: int) -> bytes | None:
        """The key of a block's content; None if no other sequence can find it."""
        return self._key_of.get(block)

    def take(self) -> tuple[int, bytes | None, Retention | None]:
        """Take a free block; returns it, the key of the content that it loses, and that content's retention."""
        self.taken += 1
        if self._empty:
            self.taken_empty += 1
            block, key, kept = self._empty.pop(), None, None
        else:
            block, kept = self.order.pop()
            key = self._key_of.pop(block)
            del self._block_of[key]
        self.references[block] = 1
        return block, key, kept

    def hold(self, block: int) -> None:
        """Add a holder to the block."""
        if not self.references[block]:
            self.order.remove(block)
        self.references[block] += 1

    def leave(self, block: int) -> bytes | None:
        """Remove a holder of the block; returns the key of its content if the block is now free but keeps it."""
        self.references[block] -= 1
        if self.references[block]:
            return None
        key = self._key_of.get(block)
        if key is None:
            self._empty.append(block)
        else:
            self.order.add(block)
        return key

    def register(self, key: bytes, block: int) -> None:
        """Record that the block has the content of `key`, which no other block has."""
        self._block_of[key] = block
        self._key_of[block] = key

    def unregister(self, block: int) -> Retention | None:
        """Make the block's content impossible to find; returns its retention."""
        del self._block_of[self._key_of.pop(block)]
        if self.order.remove(block):
            self._empty.append(block)
        return self.order.forget(block)

    def check(self, counts: list[int]) -> None:
        """Assert every invariant; `counts`: how many sequences hold each block."""
        assert counts == self.references, "reference counts are wrong"
        free = [*self._empty, *self.order]
        assert len(set(free)) == len(free), "a block is free twice"
        assert sorted(free) == [block for block, count in enumerate(counts) if count == 0], "a block leaked"
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "the prefix index is inconsistent"
        assert set(self.order) <= set(self._key_of), "a free block is cached without a key"
        assert not set(self._empty) & set(self._key_of), "an empty block with a key"
        assert all(block in self._key_of for block in self.order.kept), "a priority of a block without content"
        self.order.check()
