"""A disk that is full, or fills up, is an error with a hint; it is left as it was found."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from tests.conftest import MakeHf
from tests.convert.test_resume import Until, interrupt
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that the disk says are free."""
    free = [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, free[0]))
    return free


def size_of(out: Path) -> int:
    return sum(path.stat().st_size for path in out.glob("rank*"))


def test_a_disk_that_is_too_small_is_refused_first(make_hf: MakeHf, tmp_path: Path, free: list[int]) -> None:
    source = make_hf()
    free[0] = 1 << 40
    needed = size_of(convert(ConvertConfig(tp=2), source, tmp_path / "measured").path)
    free[0] = needed - 1
    progress = Until(0, interrupt)
    with pytest.raises(ForgeError, match=f"{needed:,} bytes are needed, {needed - 1:,} are free") as caught:
        convert(ConvertConfig(tp=2), source, tmp_path / "out", progress=progress)
    assert "Free space" in caught.value.hint
    assert progress.total == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "measured"]
    free[0] = needed
    assert size_of(convert(ConvertConfig(tp=2), source, tmp_path / "out").path) == needed


def test_what_is_finished_needs_no_more_space(make_hf: MakeHf, tmp_path: Path, free: list[int]) -> None:
    source, layout = make_hf(), ConvertConfig(pp=2)
    free[0] = 1 << 40
    with pytest.raises(KeyboardInterrupt):
        convert(layout, source, tmp_path / "out", progress=Until(0.9, interrupt))
    kept = size_of(tmp_path / ".out.partial")
    needed = size_of(convert(layout, source, tmp_path / "measured").path)
    assert 0 < kept < needed
    free[0] = needed - kept
    assert size_of(convert(layout, source, tmp_path / "out").path) == needed


def test_a_disk_that_fills_up_is_left_as_it_was(
    make_hf: MakeHf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_hf()
    convert(ConvertConfig(), source, tmp_path / "out")
    before = (tmp_path / "out/forge.json").read_bytes()
    write, left = os.write, [60_000]

    def fill(descriptor: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(descriptor, data[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(ForgeError, match=r"rank0\.safetensors: No space left on device") as caught:
        convert(ConvertConfig(pp=2), source, tmp_path / "out")
    assert "the previous content is unchanged" in caught.value.hint
    assert (tmp_path / "out/forge.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]
