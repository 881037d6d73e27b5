"""Blocks that requests ask to keep for longer or less long than others, and blocks that only some requests share."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from tests.runtime.block_invariants import check_blocks
from tests.runtime.checkpoints import write_checkpoint, write_engine
from tests.runtime.test_engine import Tokens, requests_for
from trtforge.core.errors import RequestError
from trtforge.core.features import DraftFeature
from trtforge.engine_process.requests import BeamParams, GenerationRequest
from trtforge.engine_process.retention import DEFAULT_RETENTION, KvCacheRetention, TokenRangeRetention
from trtforge.runtime.draft_model import DraftModel
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate, generate_with
from trtforge.runtime.kv_store import KvStoreOptions
from trtforge.runtime.scheduling.block_table import BlockTable, chained_key, salt_of
from trtforge.runtime.scheduling.blocks import BlockManager
from trtforge.runtime.scheduling.retention import Retention, SequenceRetention
from trtforge.runtime.scheduling.window_blocks import WindowBlocks

SIZE = 2


def of_all(priority: int, duration_ms: int | None = None, *, decode: int = DEFAULT_RETENTION) -> KvCacheRetention:
    """One priority of a whole prompt."""
    return KvCacheRetention([TokenRangeRetention(0, None, priority, duration_ms)], decode)


def computed(
    manager: BlockManager, tokens: list[int], retention: KvCacheRetention | None = None, *, prompt: int | None = None
) -> BlockTable:
    """The table of a sequence whose first `prompt` tokens, by default all, are its prompt."""
    said = None if retention is None else SequenceRetention.of(retention, len(tokens) if prompt is None else prompt)
    table = BlockTable(retention=said)
    manager.share(table, manager.find_prefix([*tokens, 0]))
    manager.extend(table, len(tokens))
    manager.seal(table, tokens, len(tokens))
    return table


def found(manager: BlockManager, *prompts: list[int]) -> list[int]:
    """How many blocks of each prompt are cached."""
    return [len(manager.find_prefix([*prompt, 0])) for prompt in prompts]


HIGH, PLAIN, LOW, OTHER = [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3], [4, 4, 4, 4]


def test_prompts_of_low_priority_make_room_first() -> None:
    manager = BlockManager(6, SIZE)
    manager.release(computed(manager, HIGH, of_all(80)))
    manager.release(computed(manager, PLAIN))
    manager.release(computed(manager, LOW, of_all(10)))
    assert found(manager, HIGH, PLAIN, LOW) == [2, 2, 2]
    running = [computed(manager, [5, 5])]
    assert found(manager, HIGH, PLAIN, LOW) == [2, 2, 1]
    running.append(computed(manager, [6, 6, 6, 6]))
    assert found(manager, HIGH, PLAIN, LOW) == [2, 1, 0]
    running.append(computed(manager, [7, 7, 7, 7]))
    assert found(manager, HIGH, PLAIN, LOW) == [1, 0, 0]
    check_blocks(manager, running)


def test_each_block_has_the_priority_of_its_range_and_generated_ones_that_of_decoding() -> None:
    manager = BlockManager(8, SIZE)
    setting = KvCacheRetention([TokenRangeRetention(0, 4, 90), TokenRangeRetention(4, 6, 50)], decode_priority=10)
    table = computed(manager, list(range(12)), setting, prompt=9)
    order = manager.pool.order
    kept = [None if (own := order.retention(block)) is None else own.priority for block in table.blocks]
    assert kept == [90, 90, 50, None, None, 10], "block 4 begins in the prompt, of whose end nothing is said"
    manager.release(table)
    check_blocks(manager, [])
    computed(manager, [50] * 8)
    assert found(manager, list(range(12))) == [4], "blocks 5 and 4, beside two that were empty"


def test_the_last_request_that_says_so_decides_of_a_shared_block() -> None:
    manager = BlockManager(8, SIZE)
    order = manager.pool.order
    first = computed(manager, HIGH, of_all(80, 5000))
    plain = computed(manager, HIGH)
    assert plain.blocks == first.blocks
    assert [order.retention(block) for block in first.blocks] == [Retention(80, 5.0)] * 2
    part = computed(manager, HIGH, KvCacheRetention([TokenRangeRetention(2, 4, 20)]))
    assert [order.retention(block) for block in first.blocks] == [Retention(80, 5.0), Retention(20)]
    default = computed(manager, HIGH, of_all(DEFAULT_RETENTION))
    assert list(order.kept) == []
    check_blocks(manager, [first, plain, part, default])


def test_a_block_that_two_requests_computed_has_the_priority_of_the_later_one() -> None:
    manager = BlockManager(8, SIZE)
    tables = [BlockTable(), BlockTable(retention=SequenceRetention.of(of_all(80), 4))]
    for table in tables:
        manager.extend(table, 4)
    manager.seal(tables[0], HIGH, 4)
    manager.release(tables[0])
    manager.seal(tables[1], HIGH, 4)
    manager.release(tables[1])
    manager.release(computed(manager, [index for index in range(20, 32)]))
    assert found(manager, HIGH) == [2]
    check_blocks(manager, [])


def test_a_priority_falls_back_after_its_duration() -> None:
    manager = BlockManager(4, SIZE)
    manager.pool.order.clock = lambda: time
    time = 0.0
    manager.release(computed(manager, HIGH, of_all(80, 1000)))
    time = 0.9
    manager.release(computed(manager, PLAIN))
    manager.release(computed(manager, OTHER))
    assert found(manager, HIGH, PLAIN, OTHER) == [2, 0, 2]
    manager.release(computed(manager, HIGH))  # from now on the duration counts anew
    time = 1.8
    manager.release(computed(manager, PLAIN))
    assert found(manager, HIGH, PLAIN, OTHER) == [2, 2, 0]
    time = 2.0
    manager.release(computed(manager, PLAIN))  # it is used again after the duration has passed
    manager.release(computed(manager, OTHER))
    assert found(manager, HIGH, PLAIN, OTHER) == [0, 2, 2]


def test_priorities_go_with_contents_to_the_host_and_back() -> None:
    manager = BlockManager(2, SIZE, host_blocks=2)
    manager.release(computed(manager, HIGH, of_all(80)))
    manager.release(computed(manager, PLAIN, of_all(90)))  # moves the other one to the host
    assert (found(manager, HIGH, PLAIN), manager.host.used) == ([2, 2], 2)
    manager.release(computed(manager, OTHER, of_all(95)))
    assert found(manager, HIGH, PLAIN, OTHER) == [0, 2, 2], "90 on the host instead of 80"
    manager.release(computed(manager, LOW, of_all(20)))
    assert found(manager, PLAIN, OTHER, LOW) == [0, 2, 2]
    manager.release(computed(manager, OTHER))
    assert found(manager, OTHER, LOW) == [2, 0], "priorities below 30 are not copied to the host"
    assert {kept.priority for block in manager.pool.order.kept if (kept := manager.pool.order.retention(block))} == {95}
    check_blocks(manager, [])


def test_a_request_says_so_of_blocks_that_stay_on_the_host_behind_its_window() -> None:
    manager = BlockManager(8, SIZE, host_blocks=8, window=3)
    tokens = list(range(16))
    manager.release(computed(manager, tokens))
    manager.release(computed(manager, list(range(100, 116))))
    assert manager.host.used == 8
    table = BlockTable(retention=SequenceRetention.of(of_all(80), 17))
    manager.share(table, manager.find_prefix([*tokens, 0]), drops=True)
    assert table.dropped == 7
    assert sorted(manager.host.order.kept) == sorted(table.keys[:7])
    manager.release(table)
    for number in range(200, 220):
        manager.release(computed(manager, [number] * 16))
    assert found(manager, tokens) == [8]
    check_blocks(manager, [])


def test_window_blocks_have_the_priority_of_their_blocks() -> None:
    windows = WindowBlocks(4, 3, SIZE, 32)
    manager = BlockManager(32, SIZE, windows=windows)
    manager.release(computed(manager, HIGH, of_all(80)))
    manager.release(computed(manager, PLAIN))
    assert found(manager, HIGH, PLAIN) == [2, 2]
    manager.release(computed(manager, OTHER))
    assert found(manager, HIGH, PLAIN, OTHER) == [2, 0, 2]
    manager.release(computed(manager, HIGH, of_all(10)))
    manager.release(computed(manager, PLAIN))
    assert found(manager, HIGH, PLAIN, OTHER) == [0, 2, 2]
    check_blocks(manager, [])


@settings(max_examples=150, deadline=None)
@given(
    operations=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.integers(1, 14),
            st.integers(0, 2),
            st.sampled_from([None, 0, 30, 35, 80]),
            st.sampled_from([35, 50]),
            st.booleans(),
        ),
        min_size=1,
        max_size=40,
    ),
    host_blocks=st.sampled_from([0, 5]),
)
def test_nothing_is_given_up_while_something_of_lower_priority_is_free(
    operations: list[tuple[int, int, int, int | None, int, bool]], host_blocks: int
) -> None:
    manager = BlockManager(12, SIZE, host_blocks=host_blocks)
    order = manager.pool.order
    tables: dict[int, BlockTable] = {}

    def free() -> dict[bytes, int]:
        kept = {manager.pool.key_of(block) or b"": order.retention(block) for block in order}
        return {key: DEFAULT_RETENTION if own is None else own.priority for key, own in kept.items()}

    for name, length, flavour, priority, decode, release in operations:
        before = free()
        tokens = [flavour] * min(length, 4) + [flavour + index % 2 for index in range(length)]
        held = manager.find_prefix([*tokens, 0]).held
        if release or name in tables:
            if name in tables:
                manager.release(tables.pop(name))
        elif manager.blocks_for(len(tokens)) - held <= manager.free_blocks:
            setting = None if priority is None else of_all(priority, decode=decode)
            tables[name] = computed(manager, tokens, setting, prompt=max(1, length - 4))
        check_blocks(manager, tables.values())
        lost = {key for key in before if manager.pool.find(key) is None}
        stayed = {key for key in before if key in free()}
        assert all(before[key] <= before[other] for key in lost for other in stayed)
    for table in tables.values():
        manager.release(table)
    check_blocks(manager, [])


@pytest.fixture(scope="module")
def small_blocks(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(checkpoint, tmp_path_factory.mktemp("engine") / "out", tokens_per_block=4, max_beam_width=2)


LONG = [[(7 * number + 3 * index) % 130 for index in range(30)] for number in range(12)]
PRESSURE = EngineOptions(kv_cache_tokens=160, max_batch_size=2)


@pytest.mark.parametrize(
    ("priority", "reused"), [(None, 0), (DEFAULT_RETENTION, 0), (36, 7), (100, 7)], ids=["none", "default", "36", "100"]
)
def test_a_prefix_of_high_priority_survives_the_prompts_after_it(
    small_blocks: Path, priority: int | None, reused: int
) -> None:
    first, *others = requests_for(LONG, 4)
    if priority is not None:
        first = replace(first, kv_retention=of_all(priority))
    with Engine.load(small_blocks, PRESSURE) as engine:
        (before,) = generate_with(engine, [first])
        generate_with(engine, others)
        (after,) = generate_with(engine, [replace(first, kv_retention=None)])
    assert before.tokens == after.tokens
    assert after.reused_blocks == reused


def test_prompts_of_low_priority_leave_the_others_in_the_cache(small_blocks: Path) -> None:
    first, *others = requests_for(LONG, 4)
    low = [replace(each, kv_retention=of_all(5, decode=5)) for each in others]
    with Engine.load(small_blocks, EngineOptions(kv_cache_tokens=160, max_batch_size=1)) as engine:
        generate_with(engine, [first])
        generate_with(engine, low)
        assert generate_with(engine, [first])[0].reused_blocks == 7
        assert sum(each.reused_blocks for each in generate_with(engine, low)) < 7 * 11


def test_all_beams_and_all_copies_of_a_prompt_keep_its_blocks(small_blocks: Path) -> None:
    first, *others = requests_for(LONG, 8)
    high = replace(first, kv_retention=of_all(80))
    for asked in ([replace(high, beams=BeamParams(2, 2))], [high, replace(high, copy_of="0")]):
        with Engine.load(small_blocks, PRESSURE) as engine:
            generate_with(engine, asked)
            generate_with(engine, others)
            assert generate_with(engine, [first])[0].reused_blocks == 7


def test_pauses_do_not_make_answers_prompts(small_blocks: Path, checkpoint: Path) -> None:
    """A paused sequence computes prompt and answer again as one context, of which only the prompt has its priority."""
    high = [replace(each, kv_retention=of_all(80)) for each in requests_for(LONG[:6], 24)]
    options = EngineOptions(kv_cache_tokens=160, scheduler="max_utilization")
    with Engine.load(small_blocks, options) as engine:
        made = generate_with(engine, high)
        assert engine.statistics().paused_requests > 0
        pool = engine._scheduler.blocks.pool
        kept = [kept.priority for block in pool.order.kept if (kept := pool.order.retention(block))]
        keys = {pool.key_of(block) for block in pool.order.kept}
    assert set(kept) == {80}
    prompts: set[bytes] = set()
    for request in high:
        key = b""
        for start in range(0, 29, 4):  # block 7 holds two tokens of the prompt, and two of the answer
            key = chained_key(key, (*request.prompt, *made[int(request.request_id)].tokens)[start : start + 4])
            prompts.add(key)
    assert keys <= prompts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_retention": of_all(101)}, "priority of kv_retention is 101; it must be a whole number from 0 to 100"),
        ({"kv_retention": KvCacheRetention((), 35, -5)}, "decode_duration_ms of kv_retention is -5"),
        ({"kv_retention": KvCacheRetention([TokenRangeRetention(4, 2)])}, "end of kv_retention is 2"),
        ({"kv_retention": KvCacheRetention([TokenRangeRetention("a")])}, "the request cannot be read: TypeError"),
        ({"cache_salt": ""}, "cache_salt has 0 characters"),
        ({"cache_salt": "a" * 1025}, "cache_salt has 1025 characters"),
        ({"cache_salt": "\ud800"}, "the request cannot be read: UnicodeEncodeError"),
        ({"cache_salt": 5}, "the request cannot be read: TypeError"),
    ],
)
def test_what_cannot_be_used_is_refused(engine_directory: Path, change: dict[str, object], message: str) -> None:
    (made,) = generate(engine_directory, [replace(GenerationRequest("a", (1,), 1), **change)])  # type: ignore[arg-type]
    assert isinstance(made.error, RequestError)
    assert made.error.message.startswith(message)


def test_no_adapter_and_no_salt_share_anything_with_others() -> None:
    salts = [None, "", "a", "b", "adapter 1", "1", "\0", "\0a", "adapter 1\0a"]
    found = [salt_of(adapter, salt) for adapter in (None, 0, 1, 11) for salt in salts]
    assert len(set(found)) == len(found)
    assert salt_of(None, None) == b""
    assert salt_of(3, None) == b"adapter 3", "blocks that were stored before there were salts"


def test_a_salt_that_is_a_blocks_key_finds_nothing() -> None:
    """Keys are digests of tokens, so anybody can compute them; some are text."""
    tokens, number = [1, 2, 3, 4, 5], 0
    while True:
        key = chained_key(b"", [number, 2])
        try:
            salt = key.decode()
            break
        except UnicodeDecodeError:
            number += 1
    manager = BlockManager(8, SIZE)
    table = BlockTable()
    manager.extend(table, 4)
    manager.seal(table, [number, *tokens[1:]], 4)
    assert table.keys[0] == salt.encode()
    assert len(manager.find_prefix(tokens[2:], salt.encode())) == 1, "the bytes themselves would find the second block"
    assert len(manager.find_prefix(tokens[2:], salt_of(None, salt))) == 0


def test_requests_share_blocks_only_with_their_own_salt(
    small_blocks: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    request = GenerationRequest("0", tuple(prompts[5]), 8)
    salted = [replace(request, cache_salt=salt) for salt in (None, "a", "b")]
    store = KvStoreOptions(tmp_path / "kv")
    with Engine.load(small_blocks, EngineOptions(kv_store=store)) as engine:
        first = [generate_with(engine, [each])[0] for each in salted]
        second = [generate_with(engine, [each])[0] for each in salted]
        copies = [replace(salted[1], copy_of=None), replace(salted[1], copy_of="0"), replace(salted[2], copy_of="0")]
        again = generate_with(engine, [replace(each, cache_salt=f"{each.cache_salt} 2") for each in copies])
    assert [each.reused_blocks for each in first] == [0, 0, 0]
    assert [each.reused_blocks for each in second] == [15, 15, 15]
    assert [each.reused_blocks for each in again] == [0, 16, 0], "siblings share, another salt does not"
    with Engine.load(small_blocks, EngineOptions(kv_store=store)) as engine:
        stored = [generate_with(engine, [each])[0] for each in (salted[2], replace(request, cache_salt="c"))]
    assert [each.reused_blocks for each in stored] == [15, 0]
    assert len({each.tokens for each in (*first, *second, *again, *stored)}) == 1


def test_salted_blocks_come_back_from_the_host_for_their_own_requests_only(small_blocks: Path) -> None:
    first, *others = (replace(each, cache_salt="a") for each in requests_for(LONG, 4))
    with Engine.load(small_blocks, EngineOptions(kv_cache_tokens=160, kv_cache_host_memory_bytes=1 << 24)) as engine:
        generate_with(engine, [first])
        generate_with(engine, others)
        assert generate_with(engine, [replace(first, cache_salt="b")])[0].reused_blocks == 0
        assert generate_with(engine, [replace(first, cache_salt=None)])[0].reused_blocks == 0
        assert generate_with(engine, [first])[0].reused_blocks == 7
        assert engine.statistics().kv_host_blocks_onboarded == 7


def test_a_draft_model_shares_its_blocks_by_salt_too(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    engine = write_engine(write_checkpoint(llama, tmp_path / "target"), tmp_path / "engine", tokens_per_block=4)
    write_engine(write_checkpoint(llama, tmp_path / "same"), engine / "draft_engine", tokens_per_block=4)
    (asked,) = requests_for(LONG[:1], 6)
    answers: list[Tokens] = []
    reused = []
    with Engine.load(engine, EngineOptions(speculation=DraftFeature(tokens=2))) as loaded:
        drafter = loaded._drafts.own
        assert isinstance(drafter, DraftModel)
        for salt in (None, "a", "a", "b"):
            before = drafter._blocks.reused_blocks
            answers.append(generate_with(loaded, [replace(asked, cache_salt=salt)])[0].tokens)
            reused.append(drafter._blocks.reused_blocks - before)
    assert len(set(answers)) == 1
    assert reused == [0, 0, 7, 0]
