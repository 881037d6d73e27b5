"""An artifact that is about to run is the manifest's to the byte: found out once, and again after any change."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trtforge.core import verified
from trtforge.core.artifact import produce
from trtforge.core.cache_records import prune_cached
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import FileRecord, Identity, fault_of
from trtforge.core.verified import open_to_run, remember_links

ENGINE = Identity(stage="engine")


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were digested, in order; files count as settled at once."""
    names: list[str] = []

    def note(path: Path, record: FileRecord) -> str | None:
        names.append(path.name)
        return fault_of(path, record)

    monkeypatch.setattr(verified, "fault_of", note)
    monkeypatch.setattr(verified, "_SETTLED_NS", -1)
    return names


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    def write(out: Path) -> dict[str, FileRecord]:
        (out / "config.json").write_text("{}")
        (out / "rank0").write_text("weights")
        (out / "tokenizer").mkdir()
        (out / "tokenizer" / "vocabulary").write_text("words")
        return {}

    return produce(tmp_path / "engine", ENGINE, write).path


ALL = ["config.json", "rank0", "vocabulary"]


def test_it_is_digested_once(engine: Path, cache: Path, digested: list[str]) -> None:
    manifest = open_to_run(engine, "engine")
    assert digested == ALL
    assert open_to_run(engine, "engine") == manifest
    assert digested == ALL


def test_without_a_cache_it_is_digested_each_time(engine: Path, digested: list[str]) -> None:
    open_to_run(engine, "engine")
    open_to_run(engine, "engine")
    assert digested == ALL * 2


def test_a_fresh_file_is_not_remembered(
    engine: Path, cache: Path, digested: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written within the clock's tick may be written again without another time."""
    monkeypatch.setattr(verified, "_SETTLED_NS", 3600 * 10**9)
    open_to_run(engine, "engine")
    open_to_run(engine, "engine")
    assert digested == ALL * 2


def rewrite(path: Path) -> None:
    """Another byte, the same size and time of the last write."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"W")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("Weights")
    other.replace(path)


@pytest.mark.parametrize("change", [rewrite, replace])
@pytest.mark.parametrize("remembered", [False, True])
def test_a_changed_byte(
    engine: Path, cache: Path, digested: list[str], change: Callable[[Path], None], remembered: bool
) -> None:
    if remembered:
        open_to_run(engine, "engine")
    change(engine / "rank0")
    with pytest.raises(ForgeError, match=r"engine .*engine is damaged: .*/rank0 was changed after it was written"):
        open_to_run(engine, "engine")
    with pytest.raises(ForgeError, match="rank0 was changed"):
        open_to_run(engine, "engine")


@pytest.mark.parametrize("remembered", [False, True])
def test_a_missing_file(engine: Path, cache: Path, digested: list[str], remembered: bool) -> None:
    if remembered:
        open_to_run(engine, "engine")
    (engine / "tokenizer" / "vocabulary").unlink()
    with pytest.raises(ForgeError, match="tokenizer/vocabulary is missing"):
        open_to_run(engine, "engine")


@pytest.mark.parametrize("name", ["rank1", ".hidden", "tokenizer/more", "model/1/model.py"])
@pytest.mark.parametrize("remembered", [False, True])
def test_a_foreign_file(engine: Path, cache: Path, digested: list[str], name: str, remembered: bool) -> None:
    if remembered:
        open_to_run(engine, "engine")
    (engine / name).parent.mkdir(parents=True, exist_ok=True)
    (engine / name).write_text("")
    with pytest.raises(ForgeError, match=f"unexpected file: {name} is not listed in its forge.json") as caught:
        open_to_run(engine, "engine")
    assert "Move that file away" in caught.value.hint


def test_what_python_compiled_for_another_server_is_to_be_deleted(engine: Path, cache: Path) -> None:
    (engine / "model" / "__pycache__").mkdir(parents=True)
    (engine / "model" / "__pycache__" / "model.cpython-311.pyc").write_text("")
    with pytest.raises(ForgeError, match=r"unexpected file: model/__pycache__/model\.cpython-311\.pyc") as caught:
        open_to_run(engine, "engine")
    _, command, _ = caught.value.hint.split("`")
    subprocess.run(["bash", "-c", command], check=True)
    open_to_run(engine, "engine")


def test_a_link_to_a_foreign_directory(engine: Path, tmp_path: Path) -> None:
    (engine / "tokenizer" / "lib").symlink_to(tmp_path)
    with pytest.raises(ForgeError, match="unexpected file: tokenizer/lib is not"):
        open_to_run(engine, "engine")


def test_a_directory_may_be_kept_elsewhere(engine: Path, tmp_path: Path) -> None:
    (engine / "tokenizer").rename(tmp_path / "elsewhere")
    (engine / "tokenizer").symlink_to(tmp_path / "elsewhere")
    assert len(open_to_run(engine, "engine").files) == 3


def test_only_what_may_have_changed_is_digested_again(engine: Path, cache: Path, digested: list[str]) -> None:
    open_to_run(engine, "engine")
    digested.clear()
    (engine / "rank0").touch()
    open_to_run(engine, "engine")
    assert digested == ["rank0"]


def test_another_place_or_manifest_is_verified_for_itself(
    engine: Path, cache: Path, digested: list[str], tmp_path: Path
) -> None:
    open_to_run(engine, "engine")
    digested.clear()
    engine.rename(tmp_path / "moved")
    open_to_run(tmp_path / "moved", "engine")
    assert digested == ALL


def test_links_to_verified_files_are_not_digested_again(
    engine: Path, cache: Path, digested: list[str], tmp_path: Path
) -> None:
    def write(out: Path) -> dict[str, FileRecord]:
        (out / "config.json").write_text("{}")  # the same bytes, and no link
        os.link(engine / "rank0", out / "rank0")
        return {}

    again = produce(tmp_path / "again", ENGINE.with_inputs({"more": "1"}), write).path
    remember_links(again, "engine", engine)
    open_to_run(again, "engine")
    assert digested == ["config.json", "rank0"], "nobody verified what it links to"
    open_to_run(engine, "engine")
    os.link(engine / "rank0", tmp_path / "link")  # another time of the last change
    remember_links(again, "engine", engine)
    remember_links(engine, "engine", engine)
    digested.clear()
    open_to_run(again, "engine")
    assert digested == ["config.json"]
    open_to_run(engine, "engine")
    assert digested == ["config.json"], "its own times were changed by the link, too"
    (engine / "rank0").write_text("Weights")
    with pytest.raises(ForgeError, match="again/rank0 was changed after it was written"):
        open_to_run(again, "engine")


def test_a_damaged_record_and_a_cache_that_cannot_be_written(
    engine: Path, cache: Path, digested: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    open_to_run(engine, "engine")
    (record,) = (cache / "verified").iterdir()
    record.write_text("{")
    open_to_run(engine, "engine")
    assert digested == ALL * 2
    record.unlink()
    (cache / "verified").rmdir()
    (cache / "verified").write_text("a file")
    open_to_run(engine, "engine")
    assert "will be verified again: the cache cannot be written" in caplog.text


def test_another_stage_and_no_artifact(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="is the result of stage engine, repository is required"):
        open_to_run(engine, "repository")
    with pytest.raises(ForgeError, match=r"is not a trtforge engine: it has no forge\.json"):
        open_to_run(tmp_path, "engine")


def test_pruning_forgets(engine: Path, cache: Path, digested: list[str]) -> None:
    open_to_run(engine, "engine")
    prune_cached(cache, lambda last_used: False)
    assert len(list((cache / "verified").iterdir())) == 1
    prune_cached(cache, lambda last_used: True)
    assert list((cache / "verified").iterdir()) == []


def test_a_full_disk_leaves_no_draft_in_the_cache(
    engine: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    open_to_run(engine, "engine")
    assert "the cache cannot be written: No space left on device" in caplog.text
    assert list((cache / "verified").iterdir()) == []
