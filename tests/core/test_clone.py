"""Copies share nothing that a write could change, with clones or without."""

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest

from trtforge.core.clone import clone_file, copy_directory


def test_copy_is_independent(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"engine" * 1000)
    clone_file(tmp_path / "a", tmp_path / "b")
    with (tmp_path / "b").open("r+b") as file:
        file.write(b"edited")
    assert (tmp_path / "a").read_bytes() == b"engine" * 1000
    assert (tmp_path / "b").read_bytes()[:12] == b"editedengine"


def test_file_system_is_asked_for_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ioctl(target: int, request: int, source: int) -> int:
        asked.append(request)
        return 0

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("fcntl.ioctl", ioctl)
    (tmp_path / "a").write_text("engine")
    clone_file(tmp_path / "a", tmp_path / "b")
    assert asked == [0x40049409]
    assert (tmp_path / "b").read_bytes() == b"", "a clone is made by the file system alone"


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("engine")
    (tmp_path / "b").write_text("mine")
    with pytest.raises(FileExistsError):
        clone_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "mine"


def test_a_directory_is_copied_whole_or_its_first_error_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    (source / "b").mkdir(parents=True)
    (source / "a").write_text("1")
    (source / "b" / "c").write_text("2")
    copy_directory(source, tmp_path / "copy")
    assert ((tmp_path / "copy/a").read_text(), (tmp_path / "copy/b/c").read_text()) == ("1", "2")
    with pytest.raises(FileExistsError):
        copy_directory(source, tmp_path / "copy")

    def full(_: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "", None, str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        copy_directory(source, tmp_path / "other")
    assert (caught.value.errno, caught.value.filename2) == (errno.ENOSPC, str(tmp_path / "other/a"))
