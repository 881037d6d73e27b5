from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.block_invariants import check_blocks
from trtforge.runtime.scheduling.block_table import BlockTable
from trtforge.runtime.scheduling.blocks import BlockManager


def grow(manager: BlockManager, table: BlockTable, tokens: list[int]) -> None:
    manager.extend(table, len(tokens))
    manager.seal(table, tokens, len(tokens))


def test_a_prefix_in_whole_blocks_is_found_and_shared() -> None:
    manager = BlockManager(8, 4)
    first, second = BlockTable(), BlockTable()
    grow(manager, first, list(range(10)))
    prefix = manager.find_prefix([*range(8), 99, 98])
    assert prefix.blocks == tuple(first.blocks[:2])
    assert prefix.idle == 0
    manager.share(second, prefix)
    manager.extend(second, 10)
    check_blocks(manager, [first, second])
    assert manager.pool.used == 4


def test_the_last_token_is_never_covered_by_a_prefix() -> None:
    manager = BlockManager(8, 4)
    table = BlockTable()
    grow(manager, table, list(range(8)))
    assert len(manager.find_prefix(list(range(8))).blocks) == 1
    assert len(manager.find_prefix(list(range(9))).blocks) == 2


def test_a_block_with_the_same_tokens_after_another_prefix_is_not_shared() -> None:
    manager = BlockManager(8, 2)
    table = BlockTable()
    grow(manager, table, [1, 2, 3, 4])
    assert len(manager.find_prefix([1, 2, 3, 4, 5]).blocks) == 2
    assert manager.find_prefix([9, 2, 3, 4, 5]).blocks == ()


def test_released_prefixes_stay_until_room_is_needed_and_continuations_go_first() -> None:
    manager = BlockManager(4, 2)
    table, other = BlockTable(), BlockTable()
    grow(manager, table, [1, 2, 3, 4])
    manager.release(table)
    assert (manager.free_blocks, len(manager.pool.order)) == (4, 2)
    manager.extend(other, 6)
    assert len(manager.pool.order) == 1
    assert len(manager.find_prefix([1, 2, 3, 4, 5]).blocks) == 1
    check_blocks(manager, [table, other])


def test_nothing_is_shared_when_reuse_is_off() -> None:
    manager = BlockManager(4, 2, reuse=False)
    table = BlockTable()
    grow(manager, table, [1, 2, 3])
    assert manager.find_prefix([1, 2, 3]).blocks == ()
    manager.release(table)
    assert len(manager.pool.order) == 0


@settings(max_examples=200, deadline=None)
@given(
    operations=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 14), st.integers(0, 2), st.booleans()), min_size=1, max_size=40
    ),
    reuse=st.booleans(),
)
def test_no_sequence_of_operations_leaks_or_wrongly_shares(
    operations: list[tuple[int, int, int, bool]], reuse: bool
) -> None:
    manager = BlockManager(12, 2, reuse=reuse)
    tables: dict[int, tuple[BlockTable, list[int]]] = {}
    for name, length, flavour, release in operations:
        if release or name in tables:
            if name in tables:
                manager.release(tables.pop(name)[0])
        else:
            tokens = [flavour] * min(length, 4) + [flavour + index % 2 for index in range(length)]
            prefix = manager.find_prefix(tokens)
            if manager.blocks_for(len(tokens)) - prefix.held <= manager.free_blocks:
                table = BlockTable()
                manager.share(table, prefix)
                manager.extend(table, len(tokens))
                manager.seal(table, tokens, len(tokens))
                tables[name] = (table, tokens)
        check_blocks(manager, (table for table, _ in tables.values()))
    for table, _ in tables.values():
        manager.release(table)
    check_blocks(manager, [])
    assert manager.free_blocks == manager.num_blocks
