"""Why a new file could not be written, and what to choose instead."""

import errno
import io
import os
from pathlib import Path
from typing import IO

import pytest

from trtforge.core.errors import ForgeError
from trtforge.core.new_file import not_written, write_new
from trtforge.core.replace import replace_text


def test_a_new_file_is_written_and_not_replaced(tmp_path: Path) -> None:
    write_new(tmp_path / "new", "Naïve\n")
    assert (tmp_path / "new").read_text(encoding="utf-8") == "Naïve\n"
    with pytest.raises(ForgeError, match="new: File exists") as caught:
        write_new(tmp_path / "new", "other")
    assert caught.value.hint == "Choose a file that does not exist yet."
    assert (tmp_path / "new").read_text(encoding="utf-8") == "Naïve\n"


def test_a_missing_directory_is_told_from_one_that_takes_no_files(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=f"there is no directory {tmp_path / 'no'}$") as caught:
        write_new(tmp_path / "no" / "x", "")
    assert caught.value.hint == "Create it, or choose another directory."
    with pytest.raises(ForgeError, match=r"^/proc/x: no new files can be created in /proc$") as caught:
        write_new(Path("/proc/x"), "")
    assert caught.value.hint == "Choose another directory."


def test_a_name_may_be_too_long(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=f"^{tmp_path}/x+: File name too long$") as caught:
        write_new(tmp_path / ("x" * 256), "")
    assert caught.value.hint == "Choose a shorter name."


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_a_directory_that_refuses_is_said(number: int) -> None:
    error = not_written(Path("a/x"), OSError(number, os.strerror(number)))
    assert error.message == f"a/x cannot be written: {os.strerror(number)}"
    assert error.hint == "Choose a directory that you may write to."


def test_an_interruption_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    class Interrupted(io.TextIOWrapper):
        def flush(self) -> None:
            super().flush()
            raise KeyboardInterrupt

        def close(self) -> None:
            self.detach().close()

    monkeypatch.setattr(Path, "open", lambda path, mode, encoding: Interrupted(opened(path, f"{mode}b"), encoding))
    with pytest.raises(KeyboardInterrupt):
        write_new(tmp_path / "new", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a new one, nor a draft beside one that is replaced."""
    (tmp_path / "old").write_text("old")
    (tmp_path / ".old.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        replace_text(tmp_path / "old", "new")
    opened = Path.open

    def full(path: Path, mode: str, **options: str) -> IO[str]:
        opened(path, mode, **options).close()
        return opened(Path("/dev/full"), "w", **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ForgeError, match="new cannot be written: No space left on device") as caught:
        write_new(tmp_path / "new", "text")
    assert caught.value.hint == "Free space, then run again."
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
