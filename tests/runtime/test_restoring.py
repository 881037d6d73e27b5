"""A long prefix outside of the cache is restored in parts while other requests generate."""

from pathlib import Path
from threading import Event

import pytest

from tests.runtime.block_invariants import check_blocks
from tests.runtime.simulation import Simulation, simulation
from trtforge.engine_process.requests import GenerationRequest, Output
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.kv_store import KvStoreOptions
from trtforge.runtime.pacing import Pace
from trtforge.runtime.scheduling.block_events import KvCacheEventDiff, KvCacheStored, KvCacheUpdated
from trtforge.runtime.scheduling.block_table import chained_key
from trtforge.runtime.scheduling.event_recorder import BlockObserver, EventRecorder, block_hash
from trtforge.runtime.scheduling.scheduler import Scheduler

LONG = list(range(100, 122))  # 5 full blocks and 2 tokens
BLOCKS = 5


class Files:
    """A store with the blocks of LONG, some of which cannot be read."""

    def __init__(self, *lost: int) -> None:
        self.keys: list[bytes] = []
        for start in range(0, 4 * BLOCKS, 4):
            self.keys.append(chained_key(self.keys[-1] if self.keys else b"", LONG[start : start + 4]))
        self.lost = {self.keys[index] for index in lost}
        self.fetched: list[int] = []

    def holds(self, key: bytes) -> bool:
        return key in self.keys  # unreadable ones as well

    def fetch(self, key: bytes, block: int) -> bool:
        self.fetched.append(self.keys.index(key))
        return key not in self.lost

    def forget(self, block: int) -> bool:
        return False

    def keep(self, key: bytes, block: int, *, waits: bool = False) -> None:
        pass


def busy(files: Files | None = None, blocks: int = 64, observer: BlockObserver | None = None) -> Simulation:
    """Two sequences are running, and a step restores at most two blocks."""
    sim = simulation(num_tokens=40, chunked=True, blocks=blocks, observer=observer)
    sim.scheduler.blocks._store = files
    sim.arrive([1, 2, 3], 30)
    sim.arrive([2, 3, 4], 30)
    sim.step()
    sim.scheduler.most_restored = 2
    return sim


def schedule(sim: Simulation) -> tuple[int, list[int]]:
    """A step: the number of blocks that it restored, and the number of tokens of each row."""
    rows = sim.scheduler.schedule()
    check_blocks(sim.scheduler.blocks, [each.table for each in sim.scheduler.holders()])
    for row in rows:
        sim.scheduler.complete(row)
        if row.samples:
            row.sequence.tokens.append(9)
    return sim.scheduler.restored, [row.count for row in rows]


def test_a_prefix_is_restored_in_parts_beside_running_sequences() -> None:
    sim = busy(files := Files())
    late = sim.arrive(LONG, 4)
    behind = sim.arrive([5, 6, 7], 4)
    assert [schedule(sim) for _ in range(4)] == [(2, [1, 1]), (2, [1, 1]), (1, [1, 1, 3, 2]), (0, [1, 1, 1, 1])]
    assert files.fetched == [0, 1, 2, 3, 4]
    assert (late.cached_tokens, late.reused_blocks, behind.cached_tokens) == (20, 5, 0)
    assert (sim.scheduler.blocks.reused_blocks, sim.scheduler.blocks.missed_blocks) == (5, 2 + 1 + 1)


@pytest.mark.parametrize("most", [None, 2])
def test_nothing_waits_where_no_sequence_runs(most: int | None) -> None:
    sim = simulation(num_tokens=40, chunked=True)
    sim.scheduler.blocks._store, sim.scheduler.most_restored = Files(), most
    sim.arrive(LONG, 4)
    assert schedule(sim) == (5, [2])


def test_what_cannot_be_read_is_computed() -> None:
    """A store that goes on saying that it has a block ends no request and delays none."""
    sim = busy(files := Files(3))
    late = sim.arrive(LONG, 4)
    assert [schedule(sim) for _ in range(2)] == [(2, [1, 1]), (4, [1, 1, 10])]
    assert files.fetched == [0, 1, 2, 3, 3]
    assert late.cached_tokens == 12


def test_two_prefixes_share_what_a_step_may_restore() -> None:
    sim = busy(Files())
    sim.scheduler.most_restored = 7
    first, second = sim.arrive(LONG, 4), sim.arrive([*LONG[:12], 1], 4)
    assert schedule(sim) == (5, [1, 1, 1, 2])
    assert (first.cached_tokens, second.cached_tokens) == (20, 12)


def test_blocks_of_host_memory_come_back_in_parts_and_their_events_too() -> None:
    recorder = EventRecorder(1000, window_size=48, vocab_size=2000)
    sim = simulation(blocks=12, num_tokens=40, chunked=True, host_blocks=8, observer=recorder)
    sim.arrive(LONG, 1)
    sim.run()
    sim.arrive([7] * 30, 18)
    sim.run()  # 12 blocks
    sim.arrive([1, 2, 3], 20)
    sim.step()
    assert sim.scheduler.blocks.host.used == BLOCKS
    keys = Files().keys
    recorder.take(None)
    sim.scheduler.most_restored = 2
    late, restored, moved = sim.arrive(LONG, 2), list[int](), list[list[int]]()
    while late.finish_reason is None:
        sim.step()
        restored.append(sim.scheduler.restored)
        updates = (event.data for event in recorder.take(0) if isinstance(event.data, KvCacheUpdated))
        moved.append([data.block_hash for data in updates if data.cache_level == KvCacheEventDiff(1, 0)])
    assert restored[:4] == [2, 2, 1, 0]
    assert moved[:4] == [[block_hash(key) for key in part] for part in (keys[:2], keys[2:4], keys[4:], [])]


def test_a_block_restored_from_a_file_has_its_event_before_the_request_runs() -> None:
    """Whoever applies the events knows a block from the moment that other prompts find it."""
    recorder = EventRecorder(1000, window_size=48, vocab_size=2000)
    sim = busy(files := Files(), observer=recorder)
    recorder.take(0)
    late, hashes = sim.arrive(LONG, 4), [block_hash(key) for key in files.keys]

    def stored() -> list[list[int]]:
        """Blocks of the prefix in new events."""
        events = [event.data for event in recorder.take(0) if isinstance(event.data, KvCacheStored)]
        found = [[block.block_hash for block in data.blocks if block.block_hash in hashes] for data in events]
        return [each for each in found if each]

    schedule(sim)
    assert (late.begun, stored()) == (False, [hashes[:2]])
    sim.scheduler.finish(late, "cancelled")
    other = sim.arrive([*LONG[:8], 1], 1)
    schedule(sim)
    assert (other.cached_tokens, stored()) == (8, [])


@pytest.mark.parametrize(("most", "steps"), [(None, 1), (1, 2), (2, 1)])
def test_blocks_behind_the_window_stay_in_host_memory(most: int | None, steps: int) -> None:
    sim = simulation(blocks=12, num_tokens=40, chunked=True, host_blocks=60, window=8)
    sim.arrive(LONG, 1)
    sim.run()
    for number in (3, 4):
        sim.arrive([number] * 30, 18)
        sim.run()
    assert sim.scheduler.blocks.host.used > BLOCKS
    sim.arrive([1, 2, 3], 20)
    sim.step()
    before = sim.scheduler.blocks.host.onboarded
    sim.scheduler.most_restored = most
    late, taken = sim.arrive(LONG, 2), 0
    while not late.begun:
        sim.step()
        taken += 1
    assert (late.cached_tokens, sim.scheduler.blocks.host.onboarded - before, taken) == (20, 2, steps)


def test_a_prefix_whose_blocks_are_overwritten_meanwhile_is_restored_at_once() -> None:
    """Running sequences take a block in each step, and the restored ones have the lowest priority."""
    sim = busy(files := Files(), blocks=30)
    sim.scheduler.most_restored = 1
    late = sim.arrive(LONG, 4)
    assert schedule(sim) == (1, [1, 1])
    block = sim.scheduler.blocks.pool.find(files.keys[0])
    assert block is not None
    sim.scheduler.blocks.pool.unregister(block)  # as if it were overwritten
    assert schedule(sim) == (5, [1, 1, 2])
    assert (late.cached_tokens, late.to_restore) == (20, None)


def test_an_engine_restores_in_parts_and_gives_the_same_tokens(
    engine_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The prompt's blocks are in files, and a request is being streamed."""
    prompt = tuple(range(3, 60))
    options = EngineOptions(chunked_context=True, kv_store=KvStoreOptions(tmp_path / "blocks"))
    with Engine.load(engine_directory, options) as engine:
        expected = generate_with(engine, [GenerationRequest("first", prompt, 6)])[0].tokens
        size = engine.statistics().tokens_per_block
    restored, schedule = [], Scheduler.schedule

    def noted(self: Scheduler) -> list[object]:
        rows = schedule(self)
        restored.append(self.restored)
        return rows

    monkeypatch.setattr(Scheduler, "schedule", noted)
    monkeypatch.setattr(Pace, "most_restored", 1)
    begun, ended, tokens = Event(), Event(), []

    def took(output: Output) -> None:
        tokens.extend(output.tokens)
        if output.finish_reason is not None:
            ended.set()

    with Engine.load(engine_directory, options) as engine:
        running = GenerationRequest("running", (5, 6, 7), 40, streamed=True)
        engine.submit((running, lambda output: begun.set()))
        assert begun.wait(60)
        engine.submit((GenerationRequest("again", prompt, 6), took))
        assert ended.wait(60)
    assert tokens == list(expected)
    assert [count for count in restored if count] == [1] * (len(prompt) // size)
