"""Events of KV blocks: who applies them to nothing knows at every moment which blocks prompts would find, and where."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.families import WINDOW
from tests.patience import PATIENCE
from tests.runtime.checkpoints import write_engine
from tests.runtime.converted import Families
from tests.runtime.simulation import simulation
from tests.runtime.tables import VOCABULARY, random_table, table_of, take_tables
from tests.runtime.test_copies import copies
from tests.runtime.test_engine import requests_for
from tests.runtime.test_host_blocks import ListedStore, LosingStore
from tests.runtime.test_speculation import NGRAMS
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.requests import BeamParams, GenerationRequest
from trtforge.engine_process.retention import DEFAULT_RETENTION, KvCacheRetention, TokenRangeRetention
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.scheduling.block_events import KvCacheEvent, KvCacheRemoved, KvCacheStored
from trtforge.runtime.scheduling.block_table import BlockTable, chained_key, salt_of
from trtforge.runtime.scheduling.blocks import BlockManager
from trtforge.runtime.scheduling.event_recorder import EventRecorder, block_hash
from trtforge.runtime.scheduling.retention import Retention, SequenceRetention
from trtforge.runtime.scheduling.sequence import Sequence
from trtforge.runtime.scheduling.virtual_tokens import VIRTUAL

SIZE = 2
HOST = 1 << 24
MOST = 100_000
RETENTIONS = st.none() | st.builds(
    lambda border, first, then: KvCacheRetention(
        [TokenRangeRetention(0, border, first), TokenRangeRetention(border, None, then)], decode_priority=then
    ),
    border=st.integers(1, 20),
    first=st.sampled_from([0, 29, 35, 80]),
    then=st.sampled_from([20, 60]),
)


def recorder(count: int = MOST) -> EventRecorder:
    return EventRecorder(count, window_size=48, vocab_size=VOCABULARY)


class Consumer:
    """What a reader of TensorRT-LLM's JSON knows of an engine's blocks: the cache level and priority of each hash."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, int]] = {}
        self.prefixes: dict[int, list[int]] = {}
        """Tokens from the beginning up to the end of each block that was ever stored."""
        self.types: list[str] = []

    def take(self, events: list[KvCacheEvent]) -> None:
        for event in events:
            told = json.loads(json.dumps(event.as_dict()))
            assert told.keys() == {"event_id", "data", "window_size"}
            assert told["event_id"] == len(self.types)
            self.types.append(told["data"]["type"])
            getattr(self, self.types[-1])(**{name: value for name, value in told["data"].items() if name != "type"})

    def created(self, num_blocks_per_cache_level: list[int]) -> None:
        assert self.types == ["created"]
        self.created_blocks = num_blocks_per_cache_level

    def stored(self, parent_hash: int | None, blocks: list[dict[str, Any]]) -> None:
        assert blocks
        before = [] if parent_hash is None else self.prefixes[parent_hash]
        for block in blocks:
            assert block["type"] == "stored_block"
            assert block["mm_keys"] == []
            assert block["block_hash"] not in self.blocks, "stored twice"
            assert {token["type"] for token in block["tokens"]} == {"unique_token"}
            before = [*before, *(token["token_id"] for token in block["tokens"])]
            assert self.prefixes.setdefault(block["block_hash"], before) == before
            self.blocks[block["block_hash"]] = (block["cache_level"], block["priority"])

    def removed(self, block_hashes: list[int]) -> None:
        for each in block_hashes:
            del self.blocks[each]

    def updated(self, block_hash: int, cache_level: dict[str, Any] | None, priority: dict[str, Any] | None) -> None:
        assert cache_level or priority
        values = []
        for known, diff in zip(self.blocks[block_hash], (cache_level, priority), strict=True):
            assert diff is None or (diff["type"], diff["old_value"]) == ("event_diff", known)
            assert diff is None or diff["new_value"] != known
            values.append(known if diff is None else diff["new_value"])
        self.blocks[block_hash] = (values[0], values[1])

    def finds(self, manager: BlockManager, tokens: list[int], salt: bytes = b"") -> int:
        """Blocks of a prompt that the engine has."""
        size, key, count = manager.tokens_per_block, salt, 0
        for start in range(0, len(tokens) - size, size):
            key = chained_key(key, tokens[start : start + size])
            if block_hash(key) not in self.blocks:
                break
            count += 1
        return count


def priority_of(kept: Retention | None) -> int:
    return DEFAULT_RETENTION if kept is None else kept.priority


def contents(manager: BlockManager) -> dict[int, tuple[int, int]]:
    """What the manager has, as a consumer would know it."""
    pool, host = manager.pool, manager.host
    found = {block_hash(key): (1, priority_of(host.order.retention(key))) for key in host._block_of}
    return found | {block_hash(key): (0, priority_of(pool.order.retention(b))) for key, b in pool._block_of.items()}


def computed(manager: BlockManager, tokens: list[int], **values: Any) -> BlockTable:
    """The table of a sequence that was computed."""
    table = BlockTable(**values)
    manager.share(table, manager.find_prefix([*tokens, 0], table.salt))
    manager.extend(table, len(tokens))
    manager.seal(table, tokens, len(tokens))
    return table


def test_events_have_the_json_of_tensorrt_llm() -> None:
    """As `KVCacheEventSerializer` of 1.3.0rc3 writes them (tensorrt_llm/_utils.py)."""
    events = recorder()
    manager = BlockManager(2, SIZE, host_blocks=1, observer=events)
    kept = SequenceRetention.of(KvCacheRetention([TokenRangeRetention(0, 2, 80)]), 4)
    manager.release(computed(manager, [1, 2, 3, 4], retention=kept))
    manager.release(computed(manager, [5, 6, 7, 8]))
    first = block_hash(chained_key(b"", [1, 2]))
    second = block_hash(chained_key(chained_key(b"", [1, 2]), [3, 4]))
    others = [block_hash(key) for key in (chained_key(b"", [5, 6]), chained_key(chained_key(b"", [5, 6]), [7, 8]))]

    def stored(own: int, tokens: list[int], priority: int) -> dict[str, Any]:
        unique = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
        keys: dict[str, Any] = {"type": "stored_block", "block_hash": own, "tokens": unique}
        return {**keys, "cache_level": 0, "priority": priority, "mm_keys": []}

    def level(own: int) -> dict[str, Any]:
        diff = {"type": "event_diff", "new_value": 1, "old_value": 0}
        return {"type": "updated", "block_hash": own, "cache_level": diff, "priority": None}

    assert [event.as_dict() for event in events.take(0)] == [
        {"event_id": number, "data": data, "window_size": 48}
        for number, data in enumerate(
            [
                {"type": "created", "num_blocks_per_cache_level": [2, 1]},
                {
                    "type": "stored",
                    "parent_hash": None,
                    "blocks": [stored(first, [1, 2], 80), stored(second, [3, 4], 35)],
                },
                level(second),
                {"type": "removed", "block_hashes": [second]},
                level(first),
                {
                    "type": "stored",
                    "parent_hash": None,
                    "blocks": [stored(others[0], [5, 6], 35), stored(others[1], [7, 8], 35)],
                },
            ]
        )
    ]
    assert events.take(0) == []


def test_a_later_block_names_its_parent_and_what_comes_back_its_level() -> None:
    events, consumer = recorder(), Consumer()
    manager = BlockManager(2, SIZE, host_blocks=2, observer=events)
    table = computed(manager, [1, 2])
    manager.extend(table, 4)
    manager.seal(table, [1, 2, 3, 4], 4)
    manager.release(table)
    consumer.take(found := events.take(0))
    assert isinstance(found[-1].data, KvCacheStored)
    assert found[-1].data.parent_hash == block_hash(chained_key(b"", [1, 2]))
    manager.release(computed(manager, [5, 6, 7, 8]))
    consumer.take(events.take(0))
    assert sorted(level for level, _ in consumer.blocks.values()) == [0, 0, 1, 1]
    manager.release(computed(manager, [1, 2, 3, 4]))
    consumer.take(events.take(0))
    assert consumer.types == ["created", "stored", "stored", *["updated"] * 2, "stored", *["updated"] * 4]
    assert consumer.blocks == contents(manager)


def test_a_priority_whose_duration_has_passed_is_told_with_the_next_event_of_its_block() -> None:
    events, consumer = recorder(), Consumer()
    manager = BlockManager(2, SIZE, host_blocks=2, observer=events)
    time = 0.0
    manager.pool.order.clock = lambda: time
    kept = SequenceRetention.of(KvCacheRetention([TokenRangeRetention(0, None, 80, 1000)]), 2)
    manager.release(computed(manager, [1, 2], retention=kept))
    time = 2.0
    manager.release(computed(manager, [3, 4]))
    consumer.take(events.take(0))
    assert sorted(consumer.blocks.values()) == [(0, 35), (0, 80)]
    manager.release(computed(manager, [5, 6, 7, 8]))
    consumer.take(events.take(0))
    assert consumer.blocks == contents(manager)
    assert sorted(consumer.blocks.values()) == [(0, 35), (0, 35), (1, 35), (1, 35)]


def test_blocks_that_files_have_are_told_when_they_are_on_the_device() -> None:
    store = ListedStore()
    events, consumer = recorder(), Consumer()
    manager = BlockManager(2, SIZE, store=store, observer=events)
    manager.release(computed(manager, [1, 2, 3, 4]))
    manager.release(computed(manager, [5, 6, 7, 8]))
    consumer.take(events.take(0))
    assert len(manager.find_prefix([1, 2, 3, 4, 0])) == 2
    assert consumer.finds(manager, [1, 2, 3, 4, 0]) == 0
    manager.release(computed(manager, [1, 2, 3, 4]))
    consumer.take(events.take(0))
    assert consumer.finds(manager, [1, 2, 3, 4, 0]) == 2
    assert consumer.blocks == contents(manager)


def test_a_block_of_a_file_that_cannot_be_read_is_not_told() -> None:
    store = LosingStore()
    store.keys.add(chained_key(b"", [1, 2]))
    events, consumer = recorder(), Consumer()
    manager = BlockManager(4, SIZE, store=store, observer=events)
    manager.share(BlockTable(), manager.find_prefix([1, 2, 3]))
    consumer.take(events.take(0))
    assert consumer.blocks == {}


def test_rows_of_a_prompt_table_and_adapters_are_told_apart() -> None:
    events = recorder()
    manager = BlockManager(8, SIZE, observer=events)
    row = VIRTUAL + 77
    computed(manager, [5, row])
    computed(manager, [5, row + 1])
    computed(manager, [5, 6], salt=salt_of(3, None), lora_id=3)
    computed(manager, [5, 6], salt=salt_of(None, "a"))
    blocks = [block for event in events.take(0)[1:] for block in event.data.blocks]  # type: ignore[union-attr]
    assert [(block.token_ids, block.token_extra_ids, block.lora_id) for block in blocks] == [
        ((5, VOCABULARY), (0, 77), None),
        ((5, VOCABULARY), (0, 78), None),
        ((5, 6), (0, 0), 3),
        ((5, 6), (0, 0), None),
    ]
    assert len({block.block_hash for block in blocks}) == 4
    assert all(0 <= block.block_hash < 2**64 for block in blocks)


def test_of_more_events_than_the_buffer_holds_the_oldest_are_dropped() -> None:
    events = recorder(3)
    manager = BlockManager(64, SIZE, observer=events)
    for token in range(10):
        manager.release(computed(manager, [token, token]))
    assert [event.event_id for event in events.take(0)] == [8, 9, 10]
    assert events.take(0) == []
    manager.release(computed(manager, [50, 50]))
    assert [event.event_id for event in events.take(0)] == [11]


def test_successive_removals_are_one_event_until_it_is_taken() -> None:
    events = recorder()
    manager = BlockManager(6, SIZE, observer=events)
    manager.release(computed(manager, list(range(12))))
    events.take(0)
    table = BlockTable()
    manager.extend(table, 6)
    taken = events.take(0)
    manager.extend(table, 10)
    more = events.take(0)
    assert [(event.event_id, len(event.data.block_hashes)) for event in taken + more] == [(2, 3), (3, 2)]  # type: ignore[union-attr]
    assert all(isinstance(event.data, KvCacheRemoved) for event in taken + more)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    blocks=st.integers(12, 30),
    batch=st.integers(1, 5),
    policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    chunked=st.booleans(),
    window=st.sampled_from([None, None, 3, 8, 17]),
    everywhere=st.booleans(),
    host_blocks=st.sampled_from([0, 3, 30]),
    restored=st.sampled_from([None, 1, 2]),
)
def test_under_any_load_events_tell_which_blocks_prompts_find(
    data: st.DataObject,
    blocks: int,
    batch: int,
    policy: SchedulerPolicy,
    chunked: bool,
    window: int | None,
    everywhere: bool,
    host_blocks: int,
    restored: int | None,
) -> None:
    events, consumer = recorder(), Consumer()
    partial = None if everywhere or host_blocks else window
    sim = simulation(
        window=window if chunked and everywhere else None,
        partial=partial,
        host_blocks=host_blocks,
        blocks=blocks,
        batch=batch,
        num_tokens=8 if chunked else 32,
        policy=policy,
        chunked=chunked,
        observer=events,
    )
    manager, sim.scheduler.most_restored = sim.scheduler.blocks, restored
    draw: Callable[[st.SearchStrategy[Any]], Any] = data.draw
    sequences: list[Sequence] = []
    stored: list[KvCacheEvent] = []

    def compare() -> None:
        taken = events.take(0)
        stored.extend(event for event in taken if isinstance(event.data, KvCacheStored))
        consumer.take(taken)
        assert consumer.blocks == contents(manager)
        for sequence in sequences:
            expected, found = consumer.finds(manager, sequence.tokens, sequence.table.salt), None
            found = len(manager.find_prefix(sequence.tokens, sequence.table.salt))
            assert found <= expected
            if partial is None and expected <= manager.free_blocks:
                assert found == expected

    for _ in range(draw(st.integers(1, 25))):
        match draw(st.integers(0, 3)):
            case 0 | 1:
                flavour, length = draw(st.integers(0, 1)), draw(st.integers(1, 32))
                adapter, salt = draw(st.integers(0, 2)), draw(st.sampled_from([None, "a"]))
                tokens, retention = draw(st.integers(1, 48)), draw(RETENTIONS)
                sequences.append(sim.arrive([flavour] * length, tokens, adapter, 0.5, retention, salt))
            case 2 if sequences:
                sim.scheduler.finish(sequences[draw(st.integers(0, len(sequences) - 1))], "cancelled")
            case _:
                sim.step(draw(st.integers(0, 9)))
        compare()
    sim.run()
    compare()
    size = manager.tokens_per_block
    known: dict[int, tuple[list[int], int | None]] = {}
    for sequence in sequences:
        key = salt_of(sequence.request.lora_task_id, sequence.request.cache_salt)
        for end in range(size, len(sequence.tokens) + 1, size):
            key = chained_key(key, sequence.tokens[end - size : end])
            known[block_hash(key)] = sequence.tokens[:end], sequence.request.lora_task_id
    for event in stored:
        for block in event.data.blocks:  # type: ignore[union-attr]
            assert (consumer.prefixes[block.block_hash], block.lora_id) == known[block.block_hash]
            assert list(block.token_ids) == known[block.block_hash][0][-size:]


@pytest.mark.parametrize(
    ("options", "types"),
    [
        (EngineOptions(kv_cache_tokens=160), {"removed"}),
        (EngineOptions(kv_cache_tokens=160, kv_cache_host_memory_bytes=HOST), {"updated"}),
        (
            EngineOptions(kv_cache_tokens=128, scheduler="max_utilization", kv_cache_host_memory_bytes=1 << 15),
            {"removed", "updated"},
        ),
        (EngineOptions(kv_cache_tokens=160, chunked_context=True, speculation=NGRAMS), {"removed"}),
    ],
    ids=["device", "host", "paused", "drafts"],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_of_an_engine_that_runs_all_kinds_of_requests_events_tell_its_blocks_at_every_step(
    checkpoint: Path, tmp_path: Path, prompts: list[list[int]], options: EngineOptions, types: set[str], ahead: bool
) -> None:
    directory = take_tables(
        write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4, max_num_tokens=128, max_beam_width=3)
    )
    rows = random_table(12, 1)
    tabled = [VOCABULARY + row for row in range(12)]
    requests = [
        *requests_for([prompt[:40] for prompt in prompts], 12),
        *copies(prompts[4], 3, 8),
        GenerationRequest("11", (*tabled, 5, 6), 8, prompt_table=table_of(rows)),
        GenerationRequest("12", (*tabled[::-1], 5, 6), 8, prompt_table=table_of(rows), cache_salt="a"),
        GenerationRequest(
            "13", tuple(prompts[2][:30]), 8, kv_retention=KvCacheRetention([TokenRangeRetention(0, 9, 80)])
        ),
    ]
    if options.speculation is None:
        requests += [replace(each, beams=BeamParams(3, 3)) for each in requests_for([prompts[2][:20]] * 2, 8)]
    consumer, wrong = Consumer(), list[str]()
    with Engine.load(directory, replace(options, kv_event_buffer_max_size=MOST)) as engine:
        engine._computes_ahead = ahead and options.speculation is None
        manager = engine._scheduler.blocks

        def compare() -> None:
            try:
                consumer.take(engine.observers.kv_cache_events(0))
                assert consumer.blocks == contents(manager)
            except (AssertionError, LookupError) as error:
                wrong.append(repr(error))

        engine.after_steps(compare)
        for _ in range(3):
            for each in generate_with(engine, requests):
                assert each.error is None
        said = engine.statistics()
    assert wrong == []
    assert consumer.created_blocks == [manager.num_blocks, manager.host.count]
    assert types <= set(consumer.types)
    assert said.kv_blocks_reused > 0
    assert (said.paused_requests > 0) == (options.scheduler == "max_utilization")


def test_events_are_there_before_an_answer_ends_and_can_be_taken_on_any_thread(
    checkpoint: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    directory = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4, max_num_tokens=128)
    consumer = Consumer()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            consumer.take(engine.observers.kv_cache_events(0.01))

    with Engine.load(directory, EngineOptions(kv_cache_tokens=256, kv_event_buffer_max_size=MOST)) as engine:
        generate_with(engine, requests_for([prompts[4]], 2))
        consumer.take(engine.observers.kv_cache_events(0))
        assert consumer.finds(engine._scheduler.blocks, [*prompts[4], 0]) == 33 // 4
        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(4):
            generate_with(engine, requests_for(prompts, 12))
        done.set()
        reader.join(PATIENCE)
        assert not reader.is_alive()
        consumer.take(engine.observers.kv_cache_events(0))
        assert consumer.blocks == contents(engine._scheduler.blocks)
        waiter = threading.Thread(target=lambda: consumer.take(engine.observers.kv_cache_events(None)))
        waiter.start()
    waiter.join(PATIENCE)
    assert not waiter.is_alive(), "the end of the engine ends all waiting"


def test_nothing_is_recorded_unless_asked_for_and_nothing_can_be_where_blocks_are_not_shared(
    engine_directory: Path,
) -> None:
    with Engine.load(engine_directory) as engine:
        assert engine.observers.blocks is None
        with pytest.raises(ForgeError, match="the engine records no KV cache events") as refusal:
            engine.observers.kv_cache_events(0)
        assert refusal.value.hint == "Load it with a kv_event_buffer_max_size, such as 10000."
    with pytest.raises(ForgeError, match="kv_event_buffer_max_size: needs KV reuse, which is off"):
        Engine.load(engine_directory, EngineOptions(kv_reuse=False, kv_event_buffer_max_size=10))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_the_window_is_that_of_the_layers_that_attend_to_the_most(
    families: Families, tmp_path: Path, name: str
) -> None:
    small = {"tokens_per_block": 4, "max_seq_len": 96, "max_batch_size": 2, "max_num_tokens": 16}
    directory = write_engine(families(name).checkpoint(), tmp_path / "engine", **small)
    options = EngineOptions(kv_cache_tokens=512, chunked_context=True, kv_event_buffer_max_size=MOST)
    consumer = Consumer()
    with Engine.load(directory, options) as engine:
        for _ in range(2):
            generate_with(engine, requests_for([[*range(3, 63)], [*range(20, 70)]], 12))
        events = engine.observers.kv_cache_events(0)
        consumer.take(events)
        assert consumer.blocks == contents(engine._scheduler.blocks)
        assert (engine._scheduler.blocks.windows is not None) == (name == "gemma3")
        # Of Gemma the layers with windows have lost the blocks that the next tokens attend to.
        assert (engine.statistics().kv_blocks_reused > 0) == (name != "gemma3")
        assert consumer.finds(engine._scheduler.blocks, [*range(3, 63)]) == 14
    assert {event.window_size for event in events} == {WINDOW if name == "mistral" else 96}
