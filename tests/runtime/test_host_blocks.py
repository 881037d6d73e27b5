"""KV blocks in host memory: contents that make room on the device are copied there, and back when they are wanted."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from tests.runtime.block_invariants import check_blocks
from tests.runtime.checkpoints import Layout, write_checkpoint, write_engine
from tests.runtime.test_engine import requests_for
from trtforge.core.errors import ForgeError
from trtforge.engine_process.requests import BeamParams
from trtforge.runtime.decoder import kv_capacity
from trtforge.runtime.decoder.block_copies import BlockCopies
from trtforge.runtime.decoder.kv_capacity import free_memory, host_block_count
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.hosted import HostJob
from trtforge.runtime.scheduling.block_table import BlockTable
from trtforge.runtime.scheduling.blocks import BlockManager
from trtforge.runtime.scheduling.host_pool import HostPool

Tokens = tuple[int, ...]
DEVICE_BLOCKS, HOST_BLOCKS = 5, 4
MEMORY = 1 << 24


def test_the_oldest_content_makes_room_on_the_host() -> None:
    pool = HostPool(10, 2)
    assert [pool.place(b"a"), pool.place(b"b")] == [10, 11]
    assert pool.place(b"a") is None  # it is there, and the newest now
    assert pool.place(b"c") == 11
    assert [pool.take(b"a"), pool.take(b"b"), pool.holds(b"c")] == [(10, None), None, True]
    assert pool.place(b"d") == 10
    assert HostPool(10, 0).place(b"a") is None
    assert (pool.count, pool.used, pool.onboarded) == (2, 2, 1)  # c and d; a came back


def computed(manager: BlockManager, tokens: list[int]) -> BlockTable:
    """The table of a sequence that was computed."""
    table = BlockTable()
    manager.share(table, manager.find_prefix([*tokens, 0]))
    manager.extend(table, len(tokens))
    manager.seal(table, tokens, len(tokens))
    return table


def test_an_evicted_block_goes_to_the_host_and_comes_back() -> None:
    manager = BlockManager(2, 2, host_blocks=2)
    first = computed(manager, [1, 2, 3, 4])
    content = {first.blocks[0]: "12", first.blocks[1]: "34"}
    manager.release(first)
    other = computed(manager, [5, 6, 7, 8])
    content |= {to: content[source] for source, to in manager.take_copies()}
    assert sorted(content[block] for block in (2, 3)) == ["12", "34"]
    content |= {other.blocks[0]: "56", other.blocks[1]: "78"}
    assert len(manager.find_prefix([1, 2, 3, 4, 5])) == 0  # no block is free
    manager.release(other)
    prefix = manager.find_prefix([1, 2, 3, 4, 5])
    assert prefix.blocks == (None, None)
    manager.share(first, prefix)
    check_blocks(manager, [first])
    content |= {to: content[source] for source, to in manager.take_copies()}
    assert [content[block] for block in first.blocks] == ["12", "34"]
    assert sorted(content[block] for block in (2, 3)) == ["56", "78"]
    assert manager.reused_blocks == 2


def test_a_block_that_is_evicted_before_it_came_back_is_copied_from_where_it_is() -> None:
    manager = BlockManager(1, 2, host_blocks=1)
    manager.release(computed(manager, [1, 2]))
    manager.release(computed(manager, [3, 4]))
    assert manager.take_copies() == [(0, 1)]
    manager.release(computed(manager, [1, 2]))
    manager.release(computed(manager, [3, 4]))
    assert manager.take_copies() == []
    manager.release(computed(manager, [1, 2]))
    assert sorted(manager.take_copies()) == [(0, 1), (1, 0)]


def test_content_that_is_computed_again_is_in_one_memory() -> None:
    """As for log probabilities of a prompt, which share no blocks."""
    manager = BlockManager(2, 2, host_blocks=3)
    first, other = BlockTable(), BlockTable()
    manager.extend(first, 4)
    manager.seal(first, [1, 2, 3, 4], 4)
    manager.release(first)
    manager.extend(other, 4)
    manager.take_copies()
    manager.release(other)
    assert manager.host.used == 2
    manager.extend(first, 4)
    manager.seal(first, [1, 2, 3, 4], 4)
    assert (manager.host.used, manager.host.onboarded) == (0, 0)
    assert manager.find_prefix([1, 2, 3, 4, 5]).blocks == tuple(first.blocks)
    check_blocks(manager, [first])


def test_a_prefix_may_lie_in_both_memories() -> None:
    """With a window the blocks behind it are given back, and so evicted, before the last ones."""
    manager = BlockManager(4, 2, host_blocks=2, window=3)
    tokens = list(range(8))
    table = computed(manager, tokens)
    blocks = list(table.blocks)
    manager.drop(table, 8)
    running = computed(manager, [50, 51])
    [(source, kept)] = manager.take_copies()
    assert (source, running.blocks) == (blocks[2], [blocks[2]])
    manager.release(table)
    prefix = manager.find_prefix([*tokens, 8])
    assert prefix.blocks == (*blocks[:2], None)  # three blocks are free, so the last one has to make room
    other = BlockTable()
    manager.share(other, prefix)
    assert other.blocks == [*blocks[:2], blocks[3]]
    assert (kept, blocks[3]) in manager.take_copies()
    check_blocks(manager, [other, running])


def test_the_start_of_a_prefix_behind_the_window_is_overwritten_last() -> None:
    """After one use of a prefix in host memory, other prompts take its last blocks first."""
    manager = BlockManager(10, 2, host_blocks=8, window=3)
    tokens = list(range(16))
    manager.release(computed(manager, tokens))
    manager.release(computed(manager, list(range(100, 120))))
    table = BlockTable()
    manager.share(table, manager.find_prefix([*tokens, 99]), drops=True)
    assert table.dropped == 7
    manager.release(table)
    found = []
    for prompt in range(200, 212):
        found.append(len(manager.find_prefix([*tokens, 99])))
        manager.release(computed(manager, [prompt, prompt]))
    assert found[0] == 8
    assert found == sorted(found, reverse=True)
    assert set(found) >= {8, 6, 5, 4}


class ListedStore:
    """A store in which nothing is read or written: keys that it has, and blocks to be filled and kept."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.filled: set[int] = set()
        self.kept: list[int] = []

    def holds(self, key: bytes) -> bool:
        return key in self.keys

    def fetch(self, key: bytes, block: int) -> bool:
        self.filled.add(block)
        return True

    def forget(self, block: int) -> bool:
        was_filled = block in self.filled
        self.filled.discard(block)
        return was_filled

    def keep(self, key: bytes, block: int, *, waits: bool = False) -> None:
        self.keys.add(key)
        self.kept.append(block)


class LosingStore(ListedStore):
    """A store that finds nothing of what it lists."""

    def fetch(self, key: bytes, block: int) -> bool:
        return False


def test_a_prefix_that_ends_early_brings_back_what_its_own_window_needs() -> None:
    store = LosingStore()
    manager = BlockManager(8, 2, host_blocks=8, store=store, window=3)
    tokens = list(range(8))
    manager.release(computed(manager, tokens[:6]))
    manager.release(computed(manager, [50 + index for index in range(16)]))
    manager.take_copies()
    assert manager.host.used == 3
    store.keys |= {*computed(BlockManager(4, 2), tokens).keys}
    prefix = manager.find_prefix([*tokens, 8])
    assert prefix.blocks == (None,) * 4
    table = BlockTable()
    manager.share(table, prefix, drops=True)  # the fourth block is lost, so that the window begins in the third
    assert (len(table.keys), table.dropped, manager.host.onboarded) == (3, 2, 1)
    assert [target for source, target in manager.take_copies() if source >= 8] == table.blocks[2:]
    check_blocks(manager, [table])


def test_a_block_is_stored_only_when_its_content_has_come_back() -> None:
    store = ListedStore()
    manager = BlockManager(1, 2, host_blocks=1, store=store)
    manager.release(computed(manager, [1, 2]))
    manager.release(computed(manager, [3, 4]))
    manager.take_copies()
    store.keys.clear()
    store.kept.clear()
    manager.release(computed(manager, [1, 2]))
    assert store.kept == []
    assert manager.take_copies() != []
    manager.release(computed(manager, [1, 2]))
    assert store.kept == [0]


def test_a_block_that_the_store_has_not_filled_yet_is_not_copied_to_the_host() -> None:
    store = ListedStore()
    earlier = BlockManager(1, 2, store=store)
    earlier.release(computed(earlier, [1, 2]))
    manager = BlockManager(1, 2, host_blocks=1, store=store)
    manager.release(computed(manager, [1, 2]))
    assert store.filled == {0}
    manager.release(computed(manager, [3, 4]))
    assert manager.take_copies() == []
    manager.release(computed(manager, [5, 6]))
    assert manager.take_copies() == [(0, 1)]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_all_blocks_are_read_before_any_is_written(data: st.DataObject) -> None:
    every = st.integers(0, DEVICE_BLOCKS + HOST_BLOCKS - 1)
    targets = data.draw(st.lists(every, min_size=1, max_size=9, unique=True))
    pairs = [(data.draw(every), target) for target in targets]
    layers = [torch.arange(7).reshape(7, 1, 1) * torch.ones(7, 2, 3), torch.arange(7, dtype=torch.int8).reshape(7, 1)]
    copies = BlockCopies(layers, DEVICE_BLOCKS, HOST_BLOCKS)
    copies.copy(np.array([(block, DEVICE_BLOCKS + block) for block in range(HOST_BLOCKS)]).reshape(-1))
    expected = [*range(DEVICE_BLOCKS), *range(HOST_BLOCKS)]
    before = list(expected)
    for source, target in pairs:
        expected[target] = before[source]
    copies.copy(np.array(pairs).reshape(-1))
    found = [layer[:DEVICE_BLOCKS].clone() for layer in layers]
    copies.copy(np.array([(DEVICE_BLOCKS + block, block) for block in range(HOST_BLOCKS)]).reshape(-1))
    for layer, own in zip(layers, found, strict=True):
        values = [*own.flatten(1)[:, 0].tolist(), *layer[:HOST_BLOCKS].flatten(1)[:, 0].tolist()]
        assert values == expected
        assert (layer == layer.flatten(1)[:, :1].reshape(-1, *[1] * (layer.dim() - 1))).all()
        assert layer[DEVICE_BLOCKS:].flatten(1)[:, 0].tolist() == [5, 6]  # spare blocks of a cache: no numbers of hosts


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(), EngineOptions()),
        (Layout(kv="FP8"), EngineOptions(chunked_context=True)),
        (Layout(), EngineOptions(scheduler="max_utilization")),
        (Layout(tp=2), EngineOptions()),
        (Layout(pp=2), EngineOptions(chunked_context=True)),
    ],
    ids=["plain", "fp8-chunked", "paused", "tp2", "pp2"],
)
def test_what_left_the_cache_is_not_computed_again(
    llama: LlamaForCausalLM, tmp_path: Path, prompts: list[list[int]], layout: Layout, options: EngineOptions
) -> None:
    checkpoint = write_checkpoint(llama, tmp_path / "checkpoint", layout)
    directory = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4, max_num_tokens=64)
    longer = [prompt[:40] + prompt[:9] for prompt in prompts]
    context: dict[int, list[int]] = {}
    answers: dict[int, list[list[Tokens]]] = {}
    for memory in (0, MEMORY):
        changed = {**vars(options), "kv_cache_tokens": 128, "kv_cache_host_memory_bytes": memory}
        with Engine.load(directory, EngineOptions(**changed)) as engine:
            answers[memory], context[memory] = [], []
            for _ in range(2):
                before = engine.statistics().context_tokens
                made = generate_with(engine, requests_for(longer, 12))
                answers[memory].append([each.tokens for each in made])
                context[memory].append(engine.statistics().context_tokens - before)
            assert engine.statistics().kv_blocks_used == 0
            figures = engine.figures()
            host = [int(figures[f"kv_host_blocks_{name}"]) for name in ("max", "used", "onboarded")]
            assert (host == [0, 0, 0]) == (memory == 0)
            assert 0 <= host[1] <= host[0]
            if not figures["paused_requests"]:  # what paused requests find again comes back, too
                assert host[2] <= figures["kv_blocks_reused"]
    assert answers[MEMORY] == answers[0] == [answers[0][0]] * 2
    known = sum((len(prompt) - 1) // 4 * 4 for prompt in longer)
    assert context[MEMORY][1] <= sum(map(len, longer)) - known + (0 if options.scheduler != "max_utilization" else 400)
    assert context[0][1] > 2 * context[MEMORY][1]


def test_beams_go_on_from_blocks_that_came_back(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(llama, tmp_path / "checkpoint")
    directory = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4, max_beam_width=3)
    prompts = [[(7 * number + 3 * index) % 130 for index in range(30)] for number in range(4)]
    requests = requests_for(prompts, 10, beams=BeamParams(3, 3))
    with Engine.load(directory, EngineOptions()) as engine:
        expected = [[beam.tokens for beam in each.beams] for each in generate_with(engine, requests)]
    options = EngineOptions(kv_cache_tokens=128, kv_cache_host_memory_bytes=MEMORY)
    with Engine.load(directory, options) as engine:
        for _ in range(2):
            made = generate_with(engine, requests)
            assert [[beam.tokens for beam in each.beams] for each in made] == expected
        assert engine.statistics().kv_blocks_reused >= 3 * 7


def test_host_memory_that_cannot_be_used_is_refused(engine_directory: Path) -> None:
    with pytest.raises(ForgeError, match="kv_cache_host_memory_bytes: needs KV reuse"):
        Engine.load(engine_directory, EngineOptions(kv_reuse=False, kv_cache_host_memory_bytes=MEMORY))
    with pytest.raises(ForgeError, match="kv_cache_host_memory_bytes is 100, less than the"):
        Engine.load(engine_directory, EngineOptions(kv_cache_host_memory_bytes=100))
    with pytest.raises(ForgeError, match="kv_cache_host_memory_bytes is -5"):
        Engine.load(engine_directory, EngineOptions(kv_cache_host_memory_bytes=-5))
    free = free_memory(torch.device("cpu"))
    with pytest.raises(ForgeError, match=r"for each of 2 ranks, but only [\d,]+ bytes of host memory are free"):
        host_block_count(free, 1024, 2, 0)
    with pytest.raises(ForgeError, match="bytes of host memory are free"):
        host_block_count(free // 4, 1024, 2, free // 2)  # beside what each rank takes of the same memory
    assert host_block_count(10 * 1024 + 1, 1024, 2, 1 << 20) == 10


def test_what_loading_freed_on_a_gpu_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps freed memory until it is told to return it."""
    memory = {"free": 1000, "kept": 200}

    def empty_cache() -> None:
        memory["free"] += memory.pop("kept")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory["free"], 5000))
    assert free_memory(torch.device("cuda", 0)) == 1200


def test_the_cache_on_the_cpu_and_host_memory_are_counted_together(
    engine_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_capacity, "free_memory", lambda device: 3 * MEMORY)
    options = EngineOptions(kv_cache_tokens=10**9, kv_cache_host_memory_bytes=MEMORY)
    with pytest.raises(
        ForgeError, match=r"kv_cache_host_memory_bytes is 16,777,216, but only [\d,]+ bytes of host memory"
    ):
        Engine.load(engine_directory, options)


def test_a_server_hands_its_setting_to_the_engine() -> None:
    job = HostJob(engine="engine", socket="socket", kv_cache_host_memory_bytes=MEMORY)
    assert job.options().kv_memory.host_bytes == MEMORY
