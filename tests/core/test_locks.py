"""A lock is held by one, or shared by several, and never by who holds a file that is gone."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from trtforge.core.locks import take_free_lock, take_lock


@contextmanager
def held(path: Path, *, shared: bool = False) -> Iterator[None]:
    descriptor = take_lock(path, shared=shared)
    try:
        yield
    finally:
        os.close(descriptor)


def test_free_lock_is_taken_at_once(tmp_path: Path) -> None:
    said: list[str] = []
    os.close(take_lock(tmp_path / "lock", waiting=lambda: said.append("waiting")))
    assert said == []


def test_who_waits_says_so_and_gets_it_in_the_end(tmp_path: Path) -> None:
    waiting, got = threading.Event(), threading.Event()

    def second() -> None:
        os.close(take_lock(tmp_path / "lock", waiting=waiting.set))
        got.set()

    thread = threading.Thread(target=second, daemon=True)
    with held(tmp_path / "lock"):
        thread.start()
        assert waiting.wait(PATIENCE)
        assert not got.is_set()
    assert got.wait(PATIENCE)


def test_shared_lock_is_held_by_several_and_excludes_the_other_kind(tmp_path: Path) -> None:
    with held(tmp_path / "lock", shared=True), held(tmp_path / "lock", shared=True):
        assert take_free_lock(tmp_path / "lock") is None
    descriptor = take_free_lock(tmp_path / "lock")
    assert descriptor is not None
    os.close(descriptor)


def test_lock_of_an_unlinked_file_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    waiting, got = threading.Event(), threading.Event()
    inodes: list[tuple[int, int]] = []

    def second() -> None:
        descriptor = take_lock(path, waiting=waiting.set)
        inodes.append((os.fstat(descriptor).st_ino, path.stat().st_ino))
        os.close(descriptor)
        got.set()

    thread = threading.Thread(target=second, daemon=True)
    with held(path):
        thread.start()
        assert waiting.wait(PATIENCE)
        path.unlink()
    assert got.wait(PATIENCE)
    assert inodes[0][0] == inodes[0][1]


def test_lock_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        take_lock(tmp_path / "absent" / "lock")
