"""KV blocks in files: found by later engines, checked when they are read, bounded in bytes."""

import errno
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import PATIENCE, eventually
from tests.runtime.block_invariants import check_blocks
from tests.runtime.checkpoints import Layout, write_engine
from tests.runtime.converted import Families
from tests.runtime.test_engine import requests_for
from trtforge.core.errors import ForgeError
from trtforge.formats.triton import RepositoryFacts
from trtforge.launch.server_arguments import model_environment
from trtforge.runtime import kv_store
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.hosted import HostJob
from trtforge.runtime.kv_store import KvStore, KvStoreOptions
from trtforge.runtime.scheduling.block_table import BlockTable
from trtforge.runtime.scheduling.blocks import BlockManager
from trtforge.serve.config import ServeConfig
from trtforge.serve.embedded import check_kv_cache_dir

TOKENS = 4  # of a block
KEY = bytes(range(16))
Opened = Callable[..., KvStore]


class Memory:
    """A store in memory, whose blocks hold the tokens up to their end, as those of an engine would."""

    def __init__(self, pool: dict[int, tuple[int, ...]]) -> None:
        self.pool, self.stored, self.lost = pool, dict[bytes, tuple[int, ...]](), set[bytes]()
        self.fills: dict[int, tuple[int, ...]] = {}
        self.offered: set[bytes] = set()

    def holds(self, key: bytes) -> bool:
        return key in self.stored

    def fetch(self, key: bytes, block: int) -> bool:
        if key in self.lost:
            del self.stored[key]
            self.lost.discard(key)
            return False
        self.fills[block] = self.stored[key]
        return True

    def forget(self, block: int) -> bool:
        return self.fills.pop(block, None) is not None

    def keep(self, key: bytes, block: int, *, waits: bool = False) -> None:
        self.offered.add(key)
        if block not in self.fills and key not in self.stored:
            self.stored[key] = self.pool[block]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_block_of_a_sequence_holds_its_tokens(data: st.DataObject) -> None:
    """Sequences come, run a step, and go in any order, on a small pool; stored blocks get lost now and then.

    There may be blocks in host memory beside the store, or instead of it. With a window, blocks behind it are dropped.
    What was computed in full has been offered to the store by the time that nobody holds it, and what a context for
    other engines has of it when it ends.
    """
    pool: dict[int, tuple[int, ...]] = {}
    store = Memory(pool)
    host_blocks = data.draw(st.integers(0, 5))
    stores = host_blocks == 0 or data.draw(st.booleans())
    window = data.draw(st.sampled_from([None, 1, 3, 5]))
    manager = BlockManager(8, 2, store=store if stores else None, host_blocks=host_blocks, window=window)
    running: list[tuple[BlockTable, list[int]]] = []
    fetched = 0
    for _ in range(data.draw(st.integers(1, 25))):
        if store.stored and data.draw(st.booleans()):
            store.lost.add(data.draw(st.sampled_from(sorted(store.stored))))
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
        prefix = manager.find_prefix(tokens)
        if manager.blocks_for(len(tokens)) - prefix.held <= manager.free_blocks:
            table = BlockTable(stored=data.draw(st.booleans()))
            drops = data.draw(st.booleans())
            manager.share(table, prefix, drops=drops)
            at_least = (*prefix.blocks, None).index(None)
            assert at_least <= len(table.blocks) <= len(prefix)
            fetched += prefix.blocks[: len(table.blocks)].count(None)
            computed = len(table.blocks) * 2
            behind = max(0, computed - window + 1) // 2 if drops and window is not None else 0
            assert table.dropped == behind
            manager.extend(table, len(tokens))
            running.append((table, tokens))
            if data.draw(st.booleans()):  # a step: stored contents are filled in, then the new tokens are computed
                pool.update([(to, pool[source]) for source, to in manager.take_copies()])
                pool.update(store.fills)
                store.fills.clear()
                for end in range(computed + 2, len(tokens) + 1, 2):
                    pool[table.blocks[end // 2 - 1]] = tuple(tokens[:end])
                manager.seal(table, tokens, len(tokens))
                for each, own in running:
                    for index in range(each.dropped, len(each.keys)):
                        assert pool[each.blocks[index]] == tuple(own[: 2 * index + 2])
        while running and (data.draw(st.booleans()) or manager.free_blocks < 2):
            table, _ = running.pop(data.draw(st.integers(0, len(running) - 1)))
            held = [] if table.stored else [each.keys for each, _ in running]
            keys = set(table.keys[table.dropped if table.stored else 0 :]).difference(*held)
            manager.release(table)
            assert not stores or keys <= store.offered
        check_blocks(manager, [table for table, _ in running])
    assert manager.reused_blocks >= fetched


def test_a_block_that_gets_other_content_is_not_filled_any_more() -> None:
    store = Memory({})
    manager = BlockManager(2, 2, store=store)
    first, second = BlockTable(), BlockTable()
    manager.extend(first, 2)
    store.pool[first.blocks[0]] = (1, 2)
    manager.seal(first, [1, 2], 2)
    manager.release(first)
    manager.extend(second, 4)  # evicts it
    manager.release(second)
    manager.share(first, manager.find_prefix([1, 2, 3]))
    assert store.fills == {first.blocks[0]: (1, 2)}
    manager.release(first)
    manager.extend(second, 4)
    assert store.fills == {}


class Blocks:
    """A cache of one rank."""

    block_layout = "two layers"

    def __init__(self, layers: list[torch.Tensor]) -> None:
        self._layers = layers
        self.block_bytes = sum(layer[0].nbytes for layer in layers)

    def read_block(self, block: int) -> torch.Tensor:
        return torch.cat([layer[block].reshape(-1).view(torch.uint8) for layer in self._layers])


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    def open_store(most_bytes: int = 1 << 20, identity: str = "weights", directory: Path = tmp_path / "kv") -> KvStore:
        layers = [torch.zeros(6, TOKENS, 2, 8, dtype=torch.bfloat16), torch.zeros(6, TOKENS, 1, 8, dtype=torch.int8)]
        store = KvStore(KvStoreOptions(directory, most_bytes), identity, Blocks(layers))
        for block in range(6):
            layers[0][block], layers[1][block] = block + 0.5, block
        return store

    return open_store


def stored_files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "kv").glob("*/*"))


def block_of(content: torch.Tensor) -> tuple[set[float], set[int]]:
    first, second = content.split([TOKENS * 2 * 8 * 2, TOKENS * 8])
    return set(first.view(torch.bfloat16).tolist()), set(second.view(torch.int8).tolist())


def test_a_block_is_found_by_the_next_store_and_by_none_of_other_weights(opened: Opened, tmp_path: Path) -> None:
    first = opened()
    first.keep(KEY, 3)
    first.close()
    (path,) = stored_files(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    other = opened(identity="others")
    assert not other.holds(KEY)
    other.close()
    later = opened()
    assert later.holds(KEY)
    assert later.fetch(KEY, 5)
    fills = later.take_fills()
    assert list(fills) == [5]
    assert block_of(fills[5]) == ({3.5}, {3})
    assert later.take_fills() == {}
    later.close()


def test_a_block_that_was_not_filled_yet_is_not_stored(opened: Opened, tmp_path: Path) -> None:
    first = opened()
    first.keep(KEY, 3)
    first.close()
    store = opened()
    assert store.fetch(KEY, 5)
    store.keep(KEY[::-1], 5)
    store.forget(5)
    assert store.take_fills() == {}
    store.keep(KEY[::-1], 4)
    store.close()
    assert [path.name for path in stored_files(tmp_path)] == sorted([KEY.hex(), KEY[::-1].hex()])
    later = opened()
    assert later.fetch(KEY[::-1], 0)
    assert block_of(later.take_fills()[0]) == ({4.5}, {4})
    later.close()


def test_blocks_larger_than_what_may_wait_are_stored_one_at_a_time(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtforge.runtime.kv_store._MOST_WAITING", 1)
    store, begun, go_on = opened(), threading.Event(), threading.Event()
    write = store._write

    def slowly(name: str, content: bytes) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        write(name, content)

    monkeypatch.setattr(store, "_write", slowly)
    store.keep(KEY, 3)
    assert begun.wait(PATIENCE)
    store.keep(KEY[::-1], 4)
    assert list(store._waiting) == [store._name(KEY)]
    go_on.set()
    assert eventually(lambda: not store._waiting)
    assert [path.name for path in stored_files(tmp_path)] == [KEY.hex()]
    store.keep(KEY[::-1], 4)
    store.close()
    later = opened()
    assert later.fetch(KEY, 0)
    assert later.fetch(KEY[::-1], 1)
    assert [block_of(content) for content in later.take_fills().values()] == [({3.5}, {3}), ({4.5}, {4})]
    later.close()


def test_two_engines_of_a_process_write_the_same_block(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One finishes while the other writes."""
    first, second = opened(), opened()
    openings, own = [0], os.open

    def in_between(path: Path, *arguments: int) -> int:
        openings[0] += 1
        file = own(path, *arguments)
        if openings[0] == 1:
            second.keep(KEY, 3)
            second.close()
        return file

    monkeypatch.setattr("trtforge.runtime.kv_store.os.open", in_between)
    first.keep(KEY, 3)
    first.close()
    monkeypatch.undo()
    assert (openings, caplog.messages) == ([2], [])
    assert [path.name for path in stored_files(tmp_path)] == [KEY.hex()]
    later = opened()
    assert later.fetch(KEY, 5)
    assert block_of(later.take_fills()[5]) == ({3.5}, {3})
    later.close()


def test_an_engine_finds_what_another_one_stores_meanwhile(opened: Opened) -> None:
    """It counts its bytes once, also if it stores the block itself."""
    first, second = opened(), opened()
    assert not second.holds(KEY)
    first.keep(KEY, 3)
    first.close()
    assert second.holds(KEY)
    assert second.fetch(KEY, 5)
    assert block_of(second.take_fills()[5]) == ({3.5}, {3})
    second._write(second._name(KEY), bytes(first._used))
    assert second._used == first._used > 0
    second.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "renamed"])
def test_a_damaged_file_is_deleted_and_not_used(opened: Opened, tmp_path: Path, damage: str) -> None:
    first = opened()
    first.keep(KEY, 3)
    first.close()
    (path,) = stored_files(tmp_path)
    content = bytearray(path.read_bytes())
    key = KEY
    if damage == "flip":
        content[7] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "gone":
        path.unlink()
    else:
        key = KEY[::-1]
        path.rename(path.with_name(key.hex()))
    store = opened()
    assert store.holds(key) == (damage in ("flip", "renamed"))
    assert not store.fetch(key, 1)
    assert store.take_fills() == {}
    assert not store.holds(key)
    assert stored_files(tmp_path) == []
    store.close()


def test_the_least_recently_used_blocks_go_first_and_files_of_others_stay(opened: Opened, tmp_path: Path) -> None:
    size = TOKENS * (2 * 8 * 2 + 8) + 32
    keys = [bytes([number] * 16) for number in range(5)]
    (tmp_path / "kv" / "letters").mkdir(parents=True)
    (tmp_path / "kv" / "letters" / "important.txt").write_text("x" * 10_000)
    first = opened(identity="older weights")
    first.keep(keys[4], 0)
    first.close()
    for number, path in enumerate(stored_files(tmp_path)):
        os.utime(path, (number, number))
    store = opened(most_bytes=3 * size)
    for block in range(3):
        store.keep(keys[block], block)
    store.close()
    names = {path.name for path in stored_files(tmp_path)}
    assert names == {"important.txt", *(key.hex() for key in keys[:3])}
    for path in stored_files(tmp_path):
        os.utime(path, (1000, 1000))
    later = opened(most_bytes=3 * size)
    assert later.fetch(keys[0], 4)  # used: now the newest
    later.close()
    last = opened(most_bytes=3 * size)
    last.keep(keys[3], 3)
    last.close()
    names = {path.name for path in stored_files(tmp_path)}
    assert keys[0].hex() in names
    assert keys[3].hex() in names
    assert len(names) == 4


def test_a_full_disk_is_said_once_and_holds_what_fits_from_then_on(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    store = opened()
    keys = [bytes([number] * 16) for number in range(4)]
    goes_on = threading.Event()

    def full(*_: object) -> None:
        goes_on.wait(PATIENCE)
        raise OSError(28, "No space left on device")

    for number in range(2):
        store.keep(keys[number], number)
    with monkeypatch.context() as patch:
        written(store)
        patch.setattr(store, "_write", full)
        for key in keys[2:]:
            store.keep(key, 0)
        goes_on.set()
        written(store)
    assert [record.getMessage() for record in caplog.records] == [
        f"{store._root}: KV blocks are not stored for 60 s: [Errno 28] No space left on device"
    ]
    store.keep(keys[2], 2)
    assert not store._waiting
    free = [0]
    monkeypatch.setattr(kv_store.os, "statvfs", lambda path: file_system(free[0]))
    monkeypatch.setattr(store, "_resumes_at", 1.0)  # the pause is over
    store.keep(keys[3], 3)
    written(store)
    assert {path.name for path in stored_files(tmp_path)} == {keys[1].hex(), keys[3].hex()}
    assert not store.holds(keys[2])
    free[0] = 1 << 20  # others left room
    store.keep(keys[0], 0)
    store.close()
    assert {path.name for path in stored_files(tmp_path)} == {keys[0].hex(), keys[1].hex(), keys[3].hex()}


def file_system(free_bytes: int, free_files: int = 10) -> SimpleNamespace:
    """Facts as of os.statvfs."""
    return SimpleNamespace(f_bavail=free_bytes, f_frsize=1, f_files=1000, f_favail=free_files)


@pytest.mark.parametrize("facts", [file_system(0), file_system(1 << 20, 0)], ids=["no bytes", "no files"])
def test_on_a_full_disk_files_of_other_engines_stay(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, facts: SimpleNamespace
) -> None:
    """Those that came after the start of this one, too; a new block replaces the oldest one."""
    store = opened()
    other = opened()
    keys = [bytes([number] * 16) for number in range(6)]
    for number in range(5):
        other.keep(keys[number], number)
    other.close()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_write", full)
        store.keep(keys[5], 5)
        written(store)
    monkeypatch.setattr(kv_store.os, "statvfs", lambda path: facts)
    monkeypatch.setattr(store, "_resumes_at", 1.0)  # the pause is over
    store.keep(keys[5], 5)
    store.close()
    names = {path.name for path in stored_files(tmp_path)}
    assert len(names) == 5
    assert keys[5].hex() in names


def test_blocks_behind_a_damaged_file_are_written_again(opened: Opened, tmp_path: Path) -> None:
    first = opened()
    keys = [bytes([number] * 16) for number in range(4)]
    for number, key in enumerate(keys):
        first.keep(key, number)
    first.close()
    for path in stored_files(tmp_path):
        content = bytearray(path.read_bytes())
        content[7] ^= 1
        path.write_bytes(content)
    second = opened()
    assert not second.fetch(keys[0], 0)
    for number, key in enumerate(keys):  # as its request computes them again
        second.keep(key, number)
    second.close()
    third = opened()
    assert all(third.fetch(key, number) for number, key in enumerate(keys))
    stamps = [path.stat().st_ino for path in stored_files(tmp_path)]
    for number, key in enumerate(keys):
        third.keep(key, number)
    third.close()
    assert [path.stat().st_ino for path in stored_files(tmp_path)] == stamps, "whole files are written once"


def test_a_lower_limit_holds_without_new_blocks(opened: Opened, tmp_path: Path) -> None:
    first = opened()
    for number in range(5):
        first.keep(bytes([number] * 16), number)
    first.close()
    for number, path in enumerate(sorted(stored_files(tmp_path))):
        os.utime(path, (number, number))
    size = stored_files(tmp_path)[0].stat().st_size
    later = opened(most_bytes=2 * size)
    later.close()
    assert {path.name for path in stored_files(tmp_path)} == {bytes([number] * 16).hex() for number in (3, 4)}


def test_a_relative_directory_stays_where_the_engine_was_opened(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = opened(directory=Path("kv"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.keep(KEY, 0)
    store.close()
    assert [path.name for path in stored_files(tmp_path)] == [KEY.hex()]
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_a_directory_for_less_than_a_block_is_refused(opened: Opened) -> None:
    with pytest.raises(ForgeError, match=r"kv: 100 bytes are less than one KV block's file of 192") as caught:
        opened(most_bytes=100)
    assert caught.value.hint == "Allow more bytes, or store no blocks."


def test_a_directory_that_was_deleted_is_made_again(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    store = opened()
    store.keep(KEY, 0)
    written(store)
    shutil.rmtree(store._root)
    store.keep(KEY[::-1], 1)
    written(store)
    assert len(caplog.messages) == 1
    monkeypatch.setattr(store, "_resumes_at", 1.0)  # the pause is over
    store.keep(KEY[::-1], 1)
    written(store)
    store.keep(KEY, 0)
    store.close()
    assert {path.name for path in stored_files(tmp_path)} == {KEY.hex(), KEY[::-1].hex()}
    assert len(caplog.messages) == 1


def written(store: KvStore) -> None:
    """Return when all that was kept so far is written, or failed."""
    done = threading.Event()
    store.when_written(done.set)
    assert done.wait(PATIENCE)


def context_of_two(
    directory: Path, options: EngineOptions, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> list[int]:
    """Tokens of prompts that each of two engines computes, one after the other, for the same answers."""
    context = []
    for _ in range(2):
        with Engine.load(directory, options) as engine:
            answers = generate_with(engine, requests_for(prompts, len(expected[0])))
            context.append(engine.statistics().context_tokens)
        assert [answer.tokens for answer in answers] == expected
    return context


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        (EngineOptions(), {}),
        (EngineOptions(scheduler="max_utilization", kv_cache_tokens=128), {"tokens_per_block": 4}),
        (EngineOptions(chunked_context=True), {"max_num_tokens": 16, "tokens_per_block": 8}),
    ],
    ids=["plain", "paused", "chunked"],
)
def test_a_restarted_engine_finds_its_blocks_and_gives_the_same_tokens(
    checkpoint: Path, prompts: list[list[int]], tmp_path: Path, options: EngineOptions, limits: dict[str, int]
) -> None:
    directory = write_engine(checkpoint, tmp_path / "engine", **{"tokens_per_block": 4, **limits})
    longer = [prompt + prompt[:9] for prompt in prompts]
    with Engine.load(directory, options) as engine:
        expected = [answer.tokens for answer in generate_with(engine, requests_for(longer, 12))]
    stored = EngineOptions(**{**vars(options), "kv_store": KvStoreOptions(tmp_path / "kv")})
    context = context_of_two(directory, stored, longer, expected)
    size = limits.get("tokens_per_block", 4)
    if options.scheduler == "guaranteed_no_evict":
        assert context[1] == sum(len(prompt) - (len(prompt) - 1) // size * size for prompt in longer)
    assert context[1] < context[0] / 2


def test_blocks_that_other_code_computed_are_not_found(
    engine_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(kv_store=KvStoreOptions(tmp_path / "kv"))
    reused = []
    for arithmetic in ("of this version", "of this version", "of the next one"):
        monkeypatch.setattr(kv_store, "_arithmetic", lambda arithmetic=arithmetic: arithmetic)
        with Engine.load(engine_directory, options) as engine:
            (answer,) = generate_with(engine, requests_for([list(range(5, 69))]))
        reused.append(answer.reused_blocks)
    assert reused[0] == reused[2] == 0 < reused[1]


@pytest.mark.parametrize(("name", "shared"), [("llama", True), ("phi3_longrope", False)])
def test_engines_of_other_lengths_share_blocks_unless_their_keys_are_rotated_otherwise(
    families: Families, tmp_path: Path, name: str, shared: bool
) -> None:
    """Below its original 64 positions, longrope divides by the short factors, above by the long ones."""
    checkpoint, prompt = families(name).checkpoint(), list(range(5, 53))
    limits = {"tokens_per_block": 4, "max_input_len": 60}
    short, long = (write_engine(checkpoint, tmp_path / str(n), max_seq_len=n, **limits) for n in (64, 96))
    with Engine.load(long, EngineOptions()) as engine:
        (expected,) = generate_with(engine, requests_for([prompt], 8))
    stored = EngineOptions(kv_store=KvStoreOptions(tmp_path / "kv"))
    for directory in (short, long):
        with Engine.load(directory, stored) as engine:
            (answer,) = generate_with(engine, requests_for([prompt], 8))
    assert answer.tokens == expected.tokens
    assert (answer.reused_blocks > 0) is shared


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("llama", Layout(pp=2), {"chunked_context": True, "scheduler": "max_utilization", "kv_cache_tokens": 128}),
        ("gemma3", Layout(tp=2), {"chunked_context": True}),
        ("llama", Layout(tp=2), {"kv_cache_tokens": 128, "kv_cache_host_memory_bytes": 8 << 10}),
    ],
    ids=["pp-chunked-paused", "windows", "host-memory"],
)
def test_blocks_of_several_ranks_are_found_after_a_restart(
    families: Families, prompts: list[list[int]], tmp_path: Path, name: str, layout: Layout, options: dict[str, Any]
) -> None:
    """A file holds what all ranks have of a block; what it brings equals what was computed."""
    checkpoint = families(name).checkpoint(tp=layout.tp, pp=layout.pp)
    directory = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4)
    longer = [prompt + prompt[:9] for prompt in prompts]
    with Engine.load(directory, EngineOptions(kv_reuse=False)) as engine:
        expected = [answer.tokens for answer in generate_with(engine, requests_for(longer, 12))]
    stored = EngineOptions(kv_store=KvStoreOptions(tmp_path / "kv"), **options)
    context = context_of_two(directory, stored, longer, expected)
    assert context[1] < context[0] / 2


def test_a_rank_that_ended_ends_storing_and_every_request(
    families: Families, prompts: list[list[int]], tmp_path: Path
) -> None:
    directory = write_engine(families("llama").checkpoint(tp=2), tmp_path / "engine", tokens_per_block=4)
    with Engine.load(directory, EngineOptions(kv_store=KvStoreOptions(tmp_path / "kv"))) as engine:
        generate_with(engine, requests_for(prompts[:1], 2))
        os.kill(engine.worker_pids[0], signal.SIGKILL)
        answers = generate_with(engine, requests_for(prompts, 12))
    assert all("rank 1" in str(answer.error) for answer in answers)


def test_engines_that_cannot_store_blocks_say_why(engine_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="a directory for KV blocks: needs KV reuse, which is off"):
        Engine.load(engine_directory, EngineOptions(kv_reuse=False, kv_store=KvStoreOptions(tmp_path / "kv")))
    (tmp_path / "file").write_text("")
    with pytest.raises(ForgeError, match=re.escape(f"{tmp_path / 'file'}: KV blocks cannot be stored there")):
        Engine.load(engine_directory, EngineOptions(kv_store=KvStoreOptions(tmp_path / "file")))


def test_a_server_hands_the_directory_to_its_engine_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServeConfig(kv_cache_dir=tmp_path / "kv", kv_cache_dir_bytes="3GiB")  # type: ignore[arg-type]
    for name, value in model_environment(config).items():
        monkeypatch.setenv(name, value)
    job = HostJob(engine="engine", socket="socket")
    assert job.options().kv_store == KvStoreOptions(tmp_path / "kv", 3 << 30)


def test_a_server_refuses_to_store_blocks_of_other_engines(tmp_path: Path) -> None:
    embedded = RepositoryFacts.model_construct(backend="torch")
    engines = RepositoryFacts.model_construct(backend="tensorrt_llm")
    check_kv_cache_dir(engines, None)
    check_kv_cache_dir(embedded, tmp_path / "new")
    with pytest.raises(ForgeError, match="an engine of backend tensorrt_llm stores no KV blocks"):
        check_kv_cache_dir(engines, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ForgeError, match="it is not a directory"):
        check_kv_cache_dir(embedded, tmp_path / "file")
