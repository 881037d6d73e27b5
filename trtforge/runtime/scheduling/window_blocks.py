"""KV blocks of sliding-window layers, in models whose other layers attend to all tokens.

The other layers keep a block as long as its sequence runs. Sliding-window layers need it only while its tokens are
within the window; during that time the block has a window block, from a second, smaller pool. TensorRT-LLM has a pool
for each window size (`WindowBlockManager`, cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp).
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from trtforge.runtime.scheduling.block_table import blocks_behind
from trtforge.runtime.scheduling.eviction import EvictionOrder
from trtforge.runtime.scheduling.retention import Retention


class WindowBlocks:
    """Assigns window blocks to the blocks of a pool.

    A window block that no sequence attends to any more keeps its content, for prompts with the same prefix, until
    another block needs it; the one left longest ago within the lowest priority is taken first.
    """

    def __init__(self, count: int, window: int, tokens_per_block: int, num_blocks: int) -> None:
        """`window`: the layers' largest window; `num_blocks`: blocks of the pool."""
        self.count = count
        self._window, self._size = window, tokens_per_block
        self.numbers: npt.NDArray[np.int64] = np.zeros(num_blocks, dtype=np.int64)
        """The window block of each block that has one; any number below `count` for the others."""
        self._users = [0] * num_blocks
        self._empty = list(range(count - 1, -1, -1))
        self._idle: EvictionOrder[int] = EvictionOrder()
        self._copies: dict[int, int] = {}

    @classmethod
    def of(cls, count: int, window: int | None, tokens_per_block: int, num_blocks: int) -> "WindowBlocks | None":
        """New window blocks; None if `count` is 0: then all layers share the same blocks."""
        return cls(count, window, tokens_per_block, num_blocks) if count and window is not None else None

    @property
    def used(self) -> int:
        """Number of window blocks that sequences attend to."""
        return self.count - len(self._empty) - len(self._idle)

    def holds(self, block: int) -> bool:
        """Whether `block` has a window block."""
        return self._users[block] > 0 or block in self._idle

    def behind(self, computed: int) -> int:
        """Number of a sequence's blocks that no token from position `computed` on attends to in these layers."""
        return blocks_behind(self._window, computed, self._size)

    def longest(self, blocks: Sequence[int | None]) -> int:
        """Length of the longest prefix of `blocks` whose blocks within the window at its end all have window blocks."""
        found = held = 0
        for count, block in enumerate(blocks, 1):
            held = held + 1 if block is not None and self.holds(block) else 0
            if held >= count - self.behind(count * self._size):
                found = count
        return found

    def take(self, block: int) -> None:
        """Give `block` a window block for new content, with one user."""
        if block in self._idle:
            self._idle.forget(block)
        else:
            self.numbers[block] = self._empty.pop() if self._empty else self.numbers[self._idle.pop()[0]]
        self._copies.pop(int(self.numbers[block]), None)
        self._users[block] = 1

    def share(self, blocks: Sequence[int]) -> None:
        """Record that another sequence attends to `blocks`, which have window blocks."""
        for block in blocks:
            self._idle.forget(block)
            self._users[block] += 1

    def leave(self, block: int, retention: Retention | None, *, keep: bool) -> None:
        """Record that a sequence no longer attends to `block`. `keep`: others may find its content later."""
        self._users[block] -= 1
        if self._users[block]:
            return
        if keep:
            self._idle.retain(block, retention)
            self._idle.add(block)
        else:
            self._empty.append(int(self.numbers[block]))

    def retain(self, block: int, retention: Retention) -> None:
        """Set the retention of `block` if no sequence attends to it; otherwise `leave` sets it later."""
        if block in self._idle:
            self._idle.retain(block, retention)

    def copy(self, source: int, target: int) -> None:
        """Copy the window block of `source` to that of `target` before the next step."""
        content = int(self.numbers[source])
        self._copies[int(self.numbers[target])] = self._copies.get(content, content)

    def take_copies(self) -> list[tuple[int, int]]:
        """Like `BlockManager.take_copies`, for window blocks."""
        copies = [(source, target) for target, source in self._copies.items()]
        self._copies.clear()
        return copies

    def check(self, attended: Iterable[list[int]]) -> None:
        """Assert every invariant; `attended`: the blocks that each sequence attends to."""
        users = [0] * len(self._users)
        for blocks in attended:
            for block in blocks:
                users[block] += 1
        assert users == self._users, "users of window blocks are wrong"
        self._idle.check()
        held = [block for block, count in enumerate(users) if count]
        assert not set(held) & set(self._idle), "a window block with users is idle"
        numbers = [*(int(self.numbers[block]) for block in (*held, *self._idle)), *self._empty]
        assert sorted(numbers) == list(range(self.count)), "a window block leaked, or has two owners"
