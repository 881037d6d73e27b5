"""The least recently used entries go first, no more than needed, and never one in use."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.core.artifact import produce
from trtforge.core.cache import Cache
from trtforge.core.cache_entry import About, Entry
from trtforge.core.cache_prune import DAY, PruneLimits, is_free, list_entries, prune, remove, sweep
from trtforge.core.manifest import Identity

ABOUT = About(architecture="LlamaForCausalLM", layers=2, hidden=64, format="int4_awq", kv_cache="int8")
NOW = 1_000 * DAY


def entry(number: int, size: int, days: float) -> Entry:
    return Entry(Path(f"/cache/{number}/{number}"), "engine", ABOUT, size, NOW - days * DAY, number)


ENTRIES = st.lists(st.tuples(st.integers(0, 100), st.floats(0, 100)), max_size=12).map(
    lambda rows: [entry(number, size, days) for number, (size, days) in enumerate(rows)]
)
LIMITS = st.builds(
    PruneLimits, st.none() | st.floats(0, 100), st.none() | st.integers(0, 600), st.booleans() | st.just(False)
)


@given(ENTRIES, LIMITS)
def test_what_stays_is_the_last_used_and_within_the_limits(entries: list[Entry], limits: PruneLimits) -> None:
    gone = prune(entries, limits, NOW, lambda entry: True).removed
    stays = [entry for entry in entries if entry not in gone]

    assert all(one.last_used <= other.last_used for one in gone for other in stays)
    if limits.everything:
        assert stays == []
    if limits.older_than is not None:
        assert all(NOW - entry.last_used <= limits.older_than * DAY for entry in stays)
    if limits.max_size is not None:
        assert sum(entry.bytes for entry in stays) <= limits.max_size


@given(ENTRIES, LIMITS)
def test_no_more_goes_than_the_limits_ask_for(entries: list[Entry], limits: PruneLimits) -> None:
    gone = prune(entries, limits, NOW, lambda entry: True).removed
    if gone and not limits.everything:
        last, stays = gone[-1], [entry for entry in entries if entry not in gone]
        old = limits.older_than is not None and NOW - last.last_used > limits.older_than * DAY
        large = limits.max_size is not None and last.bytes + sum(e.bytes for e in stays) > limits.max_size
        assert old or large


@given(ENTRIES, LIMITS, st.sets(st.integers(0, 11)))
def test_an_entry_in_use_stays_and_others_make_room(entries: list[Entry], limits: PruneLimits, used: set[int]) -> None:
    found = prune(entries, limits, NOW, lambda entry: entry.made not in used)
    assert all(entry.made in used for entry in found.in_use)
    assert all(entry.made not in used for entry in found.removed)
    if limits.max_size is not None:
        free = [entry for entry in entries if entry.made not in used and entry not in found.removed]
        stays = sum(entry.bytes for entry in entries if entry not in found.removed)
        assert stays <= limits.max_size or free == []


def make(tmp_path: Path, number: int, days: float, size: int = 100) -> Identity:
    """An entry of the cache below `tmp_path` that was last used so many days before NOW."""
    identity = Identity(stage="engine", config={"number": number})

    def write(directory: Path) -> dict:
        (directory / "rank0.engine").write_bytes(b"w" * size)
        return {}

    produce(tmp_path / f"out{number}", identity, write, cache=Cache(tmp_path / "cache", ABOUT))
    record = next(e for e in list_entries(tmp_path / "cache") if e.key == identity.digest).record
    os.utime(record, (NOW - days * DAY,) * 2)
    return identity


def keys(tmp_path: Path) -> list[str]:
    return [entry.key for entry in list_entries(tmp_path / "cache")]


def test_entries_are_listed_by_their_last_use(tmp_path: Path) -> None:
    made = [make(tmp_path, number, days).digest for number, days in enumerate((5, 1, 9))]
    assert keys(tmp_path) == [made[1], made[0], made[2]]
    (first, *_) = list_entries(tmp_path / "cache")
    assert (first.stage, first.bytes, first.about, first.last_used) == ("engine", 100, ABOUT, NOW - DAY)


def test_a_hit_is_a_use(tmp_path: Path) -> None:
    old, new = make(tmp_path, 0, 50), make(tmp_path, 1, 10)
    produce(tmp_path / "again", old, lambda directory: {}, cache=Cache(tmp_path / "cache", ABOUT))
    assert keys(tmp_path) == [old.digest, new.digest]


def test_prune_deletes_from_the_disk(tmp_path: Path) -> None:
    kept = make(tmp_path, 0, 1)
    make(tmp_path, 1, 40)
    found = prune(list_entries(tmp_path / "cache"), PruneLimits(older_than=30), NOW, remove)
    sweep(tmp_path / "cache")
    assert found.bytes == 100
    assert keys(tmp_path) == [kept.digest]
    left = sorted(path.name for path in (tmp_path / "cache" / "artifacts").iterdir())
    assert left == [kept.digest, f"{kept.digest}.lock"]


def test_sweep_clears_what_is_no_entry(tmp_path: Path) -> None:
    made = make(tmp_path, 0, 1)
    directory = tmp_path / "cache" / "artifacts" / made.digest
    (directory / ".new" / "artifact").mkdir(parents=True)
    (directory / "without-record").mkdir()
    sweep(tmp_path / "cache")
    assert [path.name for path in directory.iterdir()] == [made.digest]


def test_cache_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert list_entries(tmp_path / "none") == ()
    sweep(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("action", [remove, is_free])
def test_entry_that_is_free_is_said_to_be(tmp_path: Path, action: object) -> None:
    make(tmp_path, 0, 1)
    assert callable(action)
    assert action(list_entries(tmp_path / "cache")[0])
