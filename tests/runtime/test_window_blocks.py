"""Blocks of layers with windows, beside those of layers that attend to all tokens."""

from pathlib import Path

import numpy as np
import pytest

from tests.runtime.block_invariants import check_blocks
from tests.runtime.simulation import simulation
from trtforge.formats.attention_windows import window_blocks_for
from trtforge.runtime.decoder.kv_capacity import KvMemory
from trtforge.runtime.kv_store import KvStoreOptions
from trtforge.runtime.options import EngineOptions
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.block_table import BlockTable
from trtforge.runtime.scheduling.blocks import BlockManager
from trtforge.runtime.scheduling.step_codec import decode, encode
from trtforge.runtime.scheduling.window_blocks import WindowBlocks

SIZE, WINDOW = 4, 6


def manager(window_blocks: int, blocks: int = 32) -> tuple[BlockManager, WindowBlocks]:
    windows = WindowBlocks(window_blocks, WINDOW, SIZE, blocks)
    return BlockManager(blocks, SIZE, windows=windows), windows


def computed(blocks: BlockManager, tokens: list[int]) -> BlockTable:
    """A table whose tokens were computed in one step, from what is cached of them."""
    table = BlockTable()
    blocks.share(table, blocks.find_prefix(tokens))
    blocks.extend(table, len(tokens))
    blocks.seal(table, tokens, len(tokens))
    return table


@pytest.mark.parametrize(
    ("window", "requests", "tokens", "count"), [(1024, 8, 2048, 8 * (16 + 3) + 32), (1, 1, 1, 1 + 3 + 1)]
)
def test_the_blocks_of_a_full_batch(window: int, requests: int, tokens: int, count: int) -> None:
    assert window_blocks_for(window, 64, requests, tokens) == count


def test_a_sequence_keeps_the_blocks_within_the_window() -> None:
    """After 20 tokens the next one attends to those from position 15 on, of which block 3 holds the first."""
    blocks, windows = manager(8)
    table = computed(blocks, list(range(20)))
    assert (table.unseen, windows.used, len(table.blocks)) == (3, 2, 5)
    check_blocks(blocks, [table])
    assert len(set(windows.numbers[table.blocks[3:]].tolist())) == 2
    blocks.release(table)
    assert (windows.used, blocks.pool.used) == (0, 0)


def test_a_prompt_begins_where_all_that_it_attends_to_is_held() -> None:
    """Another prompt took the window blocks of the first blocks, which a prompt that leaves early attends to."""
    blocks, _ = manager(5)
    blocks.release(computed(blocks, list(range(20))))
    assert len(blocks.find_prefix([*range(20), 0])) == 5
    assert len(blocks.find_prefix([*range(9), 0])) == 2
    other = computed(blocks, [50, 51, 52, 53, 54, 55, 56, 57, 58])
    assert len(blocks.find_prefix([*range(20), 0])) == 5, "blocks 3 and 4 were left last"
    assert len(blocks.find_prefix([*range(9), 0])) == 0
    again = computed(blocks, [*range(20), 0])
    assert again.unseen == 4
    check_blocks(blocks, [other, again])


@pytest.mark.parametrize("held", [False, True])
def test_a_prefix_whose_window_blocks_went_is_kept_again_where_it_is_computed_again(held: bool) -> None:
    """Whether another sequence still holds the first blocks, of which it attends to none in layers with windows."""
    blocks, windows = manager(6)
    first = computed(blocks, list(range(24)))
    if not held:
        blocks.release(first)
    blocks.release(computed(blocks, list(range(50, 62))))
    assert len(blocks.find_prefix([*range(8), 0])) == 0, "window blocks of the first blocks hold others"
    again = computed(blocks, [*range(8), 0])
    check_blocks(blocks, [again, first] if held else [again])
    blocks.release(again)
    assert len(blocks.find_prefix([*range(8), 0])) == 2
    if held:
        blocks.release(first)
    check_blocks(blocks, [])
    assert (blocks.free_blocks, windows.used) == (32, 0)


def test_sequences_that_begin_alike_share_window_blocks() -> None:
    blocks, windows = manager(8)
    first = computed(blocks, list(range(20)))
    second = computed(blocks, [*range(20), 0])
    assert (windows.used, second.unseen) == (3, 4), "blocks 3 and 4 of the first, 4 and another of the second"
    blocks.release(first)
    assert windows.used == 2
    check_blocks(blocks, [second])


def test_the_last_blocks_of_beams_are_copied() -> None:
    blocks, windows = manager(12)
    table, child = computed(blocks, list(range(10))), BlockTable()
    blocks.fork([table, child], [0, 0])
    source, target = windows.numbers[[table.blocks[2], child.blocks[2]]].tolist()
    assert windows.take_copies() == [(source, target)]
    assert windows.take_copies() == []
    check_blocks(blocks, [table, child])
    assert windows.used == 3, "blocks 1 and 2, and the copy"


def test_the_copy_of_a_copy_reads_the_first() -> None:
    blocks, windows = manager(12)
    table, child, grandchild = computed(blocks, list(range(10))), BlockTable(), BlockTable()
    blocks.fork([table, child], [0, 0])
    blocks.fork([table, child, grandchild], [0, 1, 1])
    source, *targets = windows.numbers[[each.blocks[2] for each in (table, child, grandchild)]].tolist()
    assert windows.take_copies() == [(source, target) for target in targets]


def test_a_step_says_where_both_kinds_of_layers_keep_its_tokens() -> None:
    sim = simulation(partial=WINDOW)
    sim.arrive(list(range(20)), 4)
    sim.arrive(list(range(40, 47)), 4)
    for _ in range(3):
        sim.step()
    windows = sim.scheduler.blocks.windows
    assert windows is not None
    step = Step.of_rows(sim.rows, windows=windows)
    assert np.array_equal(step.window_tables, windows.numbers[step.tables])
    again = decode(np.append(encode(step), 7))
    assert again.windowed is not None
    assert np.array_equal(again.windowed.tables, step.window_tables)
    assert np.array_equal(again.tables, step.tables)
    assert again.windowed.windowed is None


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        (EngineOptions(), True),
        (EngineOptions(kv_cache_host_memory_bytes=1 << 20), False),
        (EngineOptions(kv_store=KvStoreOptions(Path("blocks"))), False),
    ],
)
def test_blocks_that_are_kept_elsewhere_hold_all_layers(options: EngineOptions, windows: bool) -> None:
    assert options.kv_memory.windows is windows
    assert KvMemory().windows is False
