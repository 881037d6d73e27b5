"""Allocation and prefix reuse of KV blocks.

Bookkeeping only: no tensor is touched. Only full blocks are shared, identified by a hash chain over all tokens up to
their end, so the partial last block of a sequence is never shared.
"""

from collections.abc import Iterable, Iterator, Sequence

from trtforge.runtime.scheduling.block_pool import BlockPool
from trtforge.runtime.scheduling.block_store import BlockStore
from trtforge.runtime.scheduling.block_table import BlockTable, Prefix, blocks_behind, chained_key
from trtforge.runtime.scheduling.event_recorder import BlockObserver
from trtforge.runtime.scheduling.host_pool import HostPool
from trtforge.runtime.scheduling.retention import Retention
from trtforge.runtime.scheduling.window_blocks import WindowBlocks


class BlockManager:
    """Allocates blocks from a fixed pool. Free blocks with a cached prefix are evicted last, see `eviction.py`.

    With a `store`, the contents of finished sequences' blocks are stored and read back when the pool lacks them. With
    `host_blocks`, evicted contents are copied to host blocks, numbered from `num_blocks` on, and read back from there.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        *,
        reuse: bool = True,
        store: BlockStore | None = None,
        window: int | None = None,
        host_blocks: int = 0,
        windows: WindowBlocks | None = None,
        observer: BlockObserver | None = None,
    ) -> None:
        """`window`: maximum number of tokens that a token attends to in any layer, itself included; None: no limit.

        `windows`: separate blocks for the sliding-window layers; then there is neither a store nor host blocks.
        """
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks)
        self.tokens_per_block, self.window = tokens_per_block, window
        self.reused_blocks = self.missed_blocks = 0
        self._reuse, self._store = reuse, store
        self.host = HostPool(num_blocks, host_blocks)
        self.windows = windows
        self._copies: dict[int, int] = {}
        self._observer = observer or BlockObserver()
        self._observer.watch(self.pool, self.host, tokens_per_block)

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds, cached ones included."""
        return self.pool.free

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks for this many tokens."""
        return -(-tokens // self.tokens_per_block)

    def find_prefix(self, tokens: Sequence[int], salt: bytes = b"") -> Prefix:
        """The cached full blocks that `tokens` start with. The last token is never covered: its logits are needed."""
        if not self._reuse:
            return Prefix()
        blocks: list[int | None] = []
        keys: list[bytes] = []
        idle, key, size = 0, salt, self.tokens_per_block
        free = self.free_blocks
        for start in range(0, len(tokens) - size, size):
            key = chained_key(key, tokens[start : start + size])
            block = self.pool.find(key)
            if block is None and not self._is_stored(key):
                break
            if block is None or not self.pool.references[block]:
                if not free:
                    break
                free -= 1
                idle += block is not None
            blocks.append(block)
            keys.append(key)
        if self.windows is not None:
            count = self.windows.longest(blocks)
            idle -= sum(block is not None and not self.pool.references[block] for block in blocks[count:])
            del blocks[count:], keys[count:]
        return Prefix(tuple(blocks), tuple(keys), idle, tokens)

    def share(self, table: BlockTable, prefix: Prefix, *, drops: bool = False, counts: bool = True) -> None:
        """Make `prefix` the start of an empty table, up to the first stored block that cannot be read.

        `drops`: leave out the blocks behind the next token's window; those in host memory stay there. The caller has
        checked that enough blocks are free for all stored ones. `counts`: the blocks count as reused or missed ones.
        """
        assert not table.blocks, "a prefix starts a table"
        for block in prefix.blocks:
            if block is not None:
                self.pool.hold(block)
        blocks = list(prefix.blocks)
        behind = self._behind(len(blocks) * self.tokens_per_block) if drops else 0
        while (failed := self._recall(blocks, prefix.keys, behind)) is not None:
            for later in blocks[failed:]:
                if later is not None:
                    self._give_back(later)
            del blocks[failed:]
            behind = self._behind(failed * self.tokens_per_block) if drops else 0  # the window now begins earlier
        for index in reversed(range(behind)):  # as in `release`
            own = blocks[index]
            if own is None:
                self.host.refresh(prefix.keys[index])
            else:
                self._give_back(own)
        table.blocks[:] = [0 if index < behind or block is None else block for index, block in enumerate(blocks)]
        table.keys[:] = prefix.keys[: len(blocks)]
        table.dropped = behind
        if table.retention is not None:
            for index, key in reversed(list(enumerate(table.keys))):  # as in `release`
                self._retain(key, table.retention.of_block(index * self.tokens_per_block))
        if counts:
            self.reused_blocks += len(blocks)
            self.missed_blocks += max(0, self.blocks_for(len(prefix.tokens)) - len(blocks))
        self._observer.stored(table, prefix.keys, prefix.tokens)
        if self.windows is not None:
            table.unseen = self.windows.behind(len(blocks) * self.tokens_per_block)
            self.windows.share(table.blocks[table.unseen :])

    def restored_by(self, prefix: Prefix, *, drops: bool) -> list[int]:
        """Indices of the blocks that `share` restores from host memory or the store. `drops`: see `share`."""
        behind = self._behind(len(prefix) * self.tokens_per_block) if drops else 0
        return list(self._lacking(prefix.blocks, prefix.keys, behind))

    def preload(self, table: BlockTable, prefix: Prefix, indices: Sequence[int]) -> bool:
        """Restore the blocks of `prefix` at these indices, which stay cached. Returns False if one cannot be read.

        `table`: of the sequence that waits for the prefix; it stays empty. The caller has checked that enough blocks
        are free for all blocks of the prefix.
        """
        held = [block for block in prefix.blocks if block is not None]
        for block in held:
            self.pool.hold(block)
        restored = [self._restore(prefix.keys[index]) for index in indices]
        for block in reversed([*held, *(each for each in restored if each is not None)]):
            self._give_back(block)
        self._observer.stored(table, prefix.keys, prefix.tokens)
        return None not in restored

    def most_held(self, tokens: int) -> int:
        """Maximum number of blocks that a table holds while it grows to this many tokens, a block or a token at a time.

        With a window: the window's blocks and one that is only partly behind it (`kSWAExtraBlock` of TensorRT-LLM's
        batch_manager/kvCacheManager.h).
        """
        most = self.blocks_for(tokens)
        return most if self.window is None else min(most, self.blocks_for(self.window) + 1)

    def still_needed(self, table: BlockTable, tokens: int) -> int:
        """Number of blocks that must be free for the table to grow like this. Dropping a shared block frees none."""
        own = sum(self.pool.references[block] == 1 for block in table.blocks[table.dropped :])
        return max(0, self.most_held(tokens) - own)

    def drop(self, table: BlockTable, computed: int) -> None:
        """Free the blocks that no token from position `computed` on attends to."""
        behind = max(table.dropped, min(self._behind(computed), len(table.keys)))
        for index in reversed(range(table.dropped, behind)):  # as in `release`
            self._give_back(table.blocks[index])
            table.blocks[index] = 0
        table.dropped = behind

    def missing(self, table: BlockTable, tokens: int) -> int:
        """Number of blocks that the table still needs to hold this many tokens."""
        return max(0, self.blocks_for(tokens) - len(table.blocks))

    def extend(self, table: BlockTable, tokens: int) -> None:
        """Allocate blocks for this many tokens; the caller has checked that enough are free."""
        for _ in range(self.missing(table, tokens)):
            table.blocks.append(self._take())

    def trim(self, table: BlockTable, tokens: int) -> int:
        """Free the blocks beyond this many tokens, left by rejected drafts; returns their number."""
        excess = max(0, len(table.blocks) - self.blocks_for(tokens))
        for _ in range(excess):
            block = table.blocks.pop()
            self._leave([block])
            self.pool.leave(block)
            assert not self.pool.references[block], "a block without computed tokens is shared"
        return excess

    def seal(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Register the blocks that `computed` tokens fill, so that other sequences can share them."""
        size = self.tokens_per_block
        for index in range(first := len(table.keys), computed // size):
            key = chained_key(table.keys[-1] if table.keys else table.salt, tokens[index * size : (index + 1) * size])
            table.keys.append(key)
            self._register(key, table.blocks[index])
            if table.stored and self._store is not None:
                self._store.keep(key, table.blocks[index], waits=True)
            if table.retention is not None:
                self._retain(key, table.retention.of_block(index * size))
        self._observer.stored(table, table.keys, tokens, first)
        if self.windows is not None:
            unseen = max(table.unseen, min(self.windows.behind(computed), len(table.keys)))
            self._leave(table.blocks[table.unseen : unseen])
            table.unseen = unseen

    def fork(self, tables: Sequence[BlockTable], parents: Sequence[int]) -> None:
        """Give table i the content of `tables[parents[i]]`.

        Full blocks are shared. A partial last block is copied, except for a parent's first child, which gets it itself.
        """
        before = [(list(table.blocks), list(table.keys), table.dropped, table.unseen) for table in tables]
        heirs = {parent: child for child, parent in reversed(list(enumerate(parents)))}
        for index, table in enumerate(tables):
            if index not in heirs:
                self.release(table)
        for child, parent in enumerate(parents):
            blocks, keys, dropped, unseen = before[parent]
            if heirs[parent] != child:
                for block in blocks[dropped : len(keys)]:
                    self.pool.hold(block)
                if self.windows is not None:
                    self.windows.share(blocks[unseen : len(keys)])
                copies = [self._take() for _ in blocks[len(keys) :]]
                for copy, block in zip(copies, blocks[len(keys) :], strict=True):
                    self._copies[copy] = self._copies.get(block, block)
                    if self.windows is not None:
                        self.windows.copy(block, copy)
                blocks = [*blocks[: len(keys)], *copies]
            table = tables[child]
            table.blocks[:], table.keys[:], table.dropped, table.unseen = blocks, keys, dropped, unseen

    def take_copies(self) -> list[tuple[int, int]]:
        """Blocks to copy before the next step, as pairs (from, to): all are read before any is written."""
        copies = [(source, target) for target, source in self._copies.items() if source != target]
        self._copies.clear()
        return copies

    def release(self, table: BlockTable) -> None:
        """Free all blocks, the last ones first, so that the start of a prefix, shared most often, is evicted last."""
        self._leave(table.blocks[table.unseen :][::-1])
        for block in reversed(table.blocks[table.dropped :]):
            self._give_back(block, stored=table.stored)
        table.blocks.clear()
        table.keys.clear()
        table.dropped = table.unseen = 0

    def _register(self, key: bytes, block: int, kept: Retention | None = None) -> None:
        known = self.pool.find(key)
        if not self._reuse or (known is not None and (self.windows is None or self.windows.holds(known))):
            return
        if known is not None:  # window layers no longer have its content; `block` has all of it
            kept = self.pool.unregister(known)
        self.pool.register(key, block)
        kept = self.host.discard(key, self._copies) or kept  # if it was computed again
        if kept is not None:
            self.pool.order.retain(block, kept)

    def _retain(self, key: bytes, kept: Retention | None) -> None:
        """Set how long the content of `key` is kept, unless `kept` is None. The last sequence that sets it decides."""
        if kept is None:
            return
        block = self.pool.find(key)
        if block is None:
            self.host.retain(key, kept)
        else:
            self.pool.order.retain(block, kept)
            if self.windows is not None:
                self.windows.retain(block, kept)
        self._observer.look(key)

    def _give_back(self, block: int, *, stored: bool = False) -> None:
        key = self.pool.leave(block) or (self.pool.key_of(block) if stored else None)
        # Content still to be copied here was offered to the store when its former block became idle.
        if key is not None and self._store is not None and block not in self._copies:
            self._store.keep(key, block, waits=stored)

    def _leave(self, blocks: Iterable[int]) -> None:
        """Record that a sequence no longer attends to these blocks in sliding-window layers."""
        if self.windows is not None:
            for block in blocks:
                self.windows.leave(block, self.pool.order.retention(block), keep=self.pool.key_of(block) is not None)

    def _behind(self, computed: int) -> int:
        """Number of blocks that no token from position `computed` on attends to."""
        return 0 if self.window is None else blocks_behind(self.window, computed, self.tokens_per_block)

    def _recall(self, blocks: list[int | None], keys: Sequence[bytes], behind: int) -> int | None:
        """Restore the blocks that `_lacking` names; returns the index of the first that fails."""
        for index in self._lacking(blocks, keys, behind):
            blocks[index] = self._restore(keys[index])
            if blocks[index] is None:
                return index
        return None

    def _lacking(self, blocks: Sequence[int | None], keys: Sequence[bytes], behind: int) -> Iterator[int]:
        """Indices of the blocks that are None, except for those of the first `behind` that stay in host memory."""
        for index, (block, key) in enumerate(zip(blocks, keys, strict=False)):
            if block is None and (index >= behind or not self.host.holds(key)):
                yield index

    def _is_stored(self, key: bytes) -> bool:
        return self.host.holds(key) or (self._store is not None and self._store.holds(key))

    def _restore(self, key: bytes) -> int | None:
        """Take a block that has the content of `key` by the next step; None if the content cannot be read."""
        found = self.host.take(key)
        content = None if found is None else self._copies.pop(found[0], found[0])
        block = self._take()
        if content is not None:
            self._copies[block] = content
        elif self._store is None or not self._store.fetch(key, block):
            self.pool.leave(block)
            return None
        self._register(key, block, None if found is None else found[1])
        return block

    def _take(self) -> int:
        block, key, kept = self.pool.take()
        filling = self._store is not None and self._store.forget(block)
        content = self._copies.pop(block, block)
        target = None if key is None or filling else self.host.place(key, kept)
        self._observer.look(key)
        if target is not None:
            self._copies[target] = content
        if self.windows is not None:
            self.windows.take(block)
        return block
