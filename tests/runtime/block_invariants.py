"""What holds of a block manager at any time."""

from collections.abc import Iterable

from trtforge.runtime.scheduling.block_table import BlockTable
from trtforge.runtime.scheduling.blocks import BlockManager


def check_blocks(manager: BlockManager, tables: Iterable[BlockTable]) -> None:
    """Assert every invariant; `tables` must be all tables in use."""
    counts, tables = [0] * manager.num_blocks, list(tables)
    if manager.windows is not None:
        manager.windows.check(table.blocks[table.unseen :] for table in tables)
    for table in tables:
        held = table.blocks[table.dropped :]
        assert len(set(held)) == len(held), "a block twice in one table"
        assert table.dropped <= len(table.keys) <= len(table.blocks), "keys of blocks that are not full"
        for index, block in enumerate(held, table.dropped):
            counts[block] += 1
            if counts[block] > 1:
                assert index < len(table.keys), "a partial block is shared"
                assert manager.pool.key_of(block) in (None, table.keys[index]), "a block has another key"
    manager.pool.check(counts)
    manager.host.check(manager.pool)
