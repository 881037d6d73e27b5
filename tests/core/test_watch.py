"""A file that was written, replaced or removed while it was watched is named."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trtforge.core.errors import ForgeError
from trtforge.core.watch import Watch


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "weights"
    path.parent.mkdir()
    path.write_bytes(b"before")
    os.utime(path, ns=(0, 1_000_000_000))
    return path


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"after!")


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(0, 1_000_000_000))
    other.replace(path)


def test_an_untouched_file_passes(file: Path) -> None:
    watch = Watch(file.parent)
    file.read_bytes()
    watch.require_unchanged([file])


@pytest.mark.parametrize("change", [rewrite, replace, lambda path: os.truncate(path, 3)])
def test_a_changed_file_is_named(file: Path, change: Callable[[Path], None]) -> None:
    watch = Watch(file.parent)
    change(file)
    with pytest.raises(ForgeError, match=r"source/weights changed while it was read") as caught:
        watch.require_unchanged([file])
    assert "nothing was published" in caught.value.hint


def test_a_removed_file_is_named(file: Path) -> None:
    watch = Watch(file.parent)
    file.unlink()
    with pytest.raises(ForgeError, match="weights disappeared while it was read"):
        watch.require_unchanged([file])


def test_a_file_that_came_later_is_named(file: Path) -> None:
    watch = Watch(file.parent)
    (file.parent / "more").write_text("")
    with pytest.raises(ForgeError, match="more changed while it was read"):
        watch.require_unchanged([file.parent / "more"])


def test_what_a_link_points_to_is_watched(file: Path) -> None:
    link = file.parent / "link"
    link.symlink_to("weights")
    watch = Watch(file.parent)
    rewrite(file)
    with pytest.raises(ForgeError, match="link changed"):
        watch.require_unchanged([link])
