"""Where nothing can be written is found before the work."""

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtforge.core.artifact import produce
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import FileRecord, Identity
from trtforge.core.output_place import require_output, require_writable

ENGINE = Identity(stage="engine")


def deny(monkeypatch: pytest.MonkeyPatch, *denied: Path) -> None:
    """As for a user who may not write there; the tests may run as root."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) not in denied)


@pytest.mark.parametrize("name", ["out", "a/b/out"])
@pytest.mark.parametrize(("flag", "why"), [(0, "Permission denied"), (os.ST_RDONLY, "Read-only file system")])
def test_a_place_without_the_right_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, flag: int, why: str
) -> None:
    require_output(tmp_path / name, "engine")
    deny(monkeypatch, tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: type("Status", (), {"f_flag": flag}))
    place = (tmp_path / name).parent
    with pytest.raises(ForgeError) as caught:
        require_output(tmp_path / name, "engine")
    assert caught.value.message == f"{place}: cannot write there: {why}"
    assert caught.value.hint == "Choose an output directory you may write to."


def test_a_link_is_judged_by_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "engine")
    deny(monkeypatch, tmp_path)
    require_output(tmp_path / "out", "engine")
    deny(monkeypatch, tmp_path / "disk")
    with pytest.raises(ForgeError, match=f"{tmp_path}/disk: cannot write there"):
        require_output(tmp_path / "out", "engine")


def test_below_a_file_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ForgeError, match=f"{tmp_path}/file is a file, not a directory"):
        require_writable(tmp_path / "file" / "out")


def test_a_name_may_be_too_long_for_the_files_beside_it(tmp_path: Path) -> None:
    out = tmp_path / ("x" * 250)
    with pytest.raises(ForgeError) as caught:
        produce(out, ENGINE, lambda directory: {})
    assert caught.value.message == f"{out}: File name too long"
    assert caught.value.hint == "Choose a shorter name."


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ForgeError) as caught:
        produce(tmp_path / "out", ENGINE, lambda directory: {})
    assert caught.value.message == f"{tmp_path}: files cannot be locked there: Function not implemented"
    assert caught.value.hint.startswith("Choose a directory on another file system. Lustre needs")


def test_files_of_another_user_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They could be moved aside but not deleted, and would be in the way next time."""

    def write(directory: Path) -> dict[str, FileRecord]:
        (directory / "rank0.engine").write_text("x")
        return {}

    out = produce(tmp_path / "out", ENGINE, write).path
    deny(monkeypatch, out)
    assert produce(out, ENGINE, write).cached
    with pytest.raises(ForgeError, match=f"{out} cannot be replaced: its files belong to another user"):
        produce(out, ENGINE.model_copy(update={"config": {"tp": 2}}), write)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_only_the_first_files_of_others_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OUT may be a home directory by mistake, or the root of the file system, below which not all can be read."""

    def walk(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        yield str(top), [], ["a", "b", "c", "d"]
        raise AssertionError("the rest is not looked at")

    monkeypatch.setattr(os, "walk", walk)
    with pytest.raises(ForgeError, match=r"has files that trtforge did not write \(a, b, c\)"):
        require_output(tmp_path, "engine")


@pytest.mark.parametrize("target", ["/", "/no/such/file"])
def test_a_link_of_others_is_not_replaced(tmp_path: Path, target: str) -> None:
    out = produce(tmp_path / "out", ENGINE, lambda directory: {}).path
    (out / "data").symlink_to(target)
    with pytest.raises(ForgeError, match=r"has files that trtforge did not write \(data\)"):
        produce(out, ENGINE.model_copy(update={"config": {"tp": 2}}), lambda directory: {})
    assert (out / "data").is_symlink()


def test_an_artifact_holds_no_other(tmp_path: Path) -> None:
    """It would be a file that its manifest does not list; a forge.json of another program is no manifest."""
    (tmp_path / "forge.json").write_text('{"minecraft": "1.20"}')
    produce(tmp_path / "engine", ENGINE, lambda directory: {})
    require_output(tmp_path / "repository", "repository")
    with pytest.raises(ForgeError) as caught:
        require_output(tmp_path / "engine" / "a" / "repository", "repository")
    assert caught.value.message == (
        f"{tmp_path}/engine/a/repository is inside of the engine {tmp_path}/engine, which has only its own files"
    )
    assert caught.value.hint == "Choose a directory beside it."
