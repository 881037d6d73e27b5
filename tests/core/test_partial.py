"""What a killed run finished is kept by the next run of the same identity, and nothing else is."""

import shutil
from pathlib import Path

import pytest

from trtforge.core.artifact import produce
from trtforge.core.errors import ForgeError, LoggedError
from trtforge.core.manifest import Identity, open_artifact, record_of
from trtforge.core.partial import RECORD, Finished, Group


def identity(**config: object) -> Identity:
    return Identity(stage="checkpoint", config=config)


def finish(directory: Path, name: str, text: str, made_from: str = "source") -> Group:
    (directory / name).write_text(text)
    group = Group(made_from=made_from, files={name: record_of(directory / name)})
    Finished.read(directory).add(group)
    return group


def interrupted(out: Path, **config: object) -> None:
    """A run that finished `one`, began `two` and was interrupted."""

    def write(directory: Path) -> dict:
        finish(directory, "one", "1")
        (directory / "two").write_text("half")
        (directory / "sub").mkdir()
        (directory / "sub/three").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        produce(out, identity(**config), write)


def found_by_the_next_run(out: Path, **config: object) -> list[str]:
    """The names that the next run begins with; it completes the artifact."""
    found: list[str] = []

    def write(directory: Path) -> dict:
        found.extend(sorted(path.name for path in directory.iterdir() if path.name != RECORD))
        for name in ("one", "two"):
            (directory / name).write_text(name)
        return {}

    produce(out, identity(**config), write)
    return found


def test_only_what_is_finished_stays(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / ".out.partial").iterdir()) == [RECORD, "one"]
    assert found_by_the_next_run(tmp_path / "out") == ["one"]
    assert sorted(open_artifact(tmp_path / "out", "checkpoint").files) == ["one", "two"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_is_not_what_was_recorded_is_made_again(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    (tmp_path / ".out.partial/one").write_text("2")
    assert found_by_the_next_run(tmp_path / "out") == []


def test_another_identity_starts_afresh(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", tp=1)
    assert found_by_the_next_run(tmp_path / "out", tp=2) == []


@pytest.mark.parametrize("record", ["", "{", '{"identity": 3}', '{"groups": [{"files": {"../out": {}}}]}'])
def test_a_damaged_record_is_no_record(tmp_path: Path, record: str) -> None:
    interrupted(tmp_path / "out")
    (tmp_path / ".out.partial" / RECORD).write_text(record)
    assert found_by_the_next_run(tmp_path / "out") == []


def test_names_in_a_record_are_no_paths(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("1")
    directory = tmp_path / "partial"
    Finished.begin(directory, identity())
    Finished.read(directory).add(Group(made_from="", files={"../mine": record_of(tmp_path / "mine")}))
    Finished.begin(directory, identity())
    assert Finished.read(directory).group({"../mine"}) is None


def test_an_interruption_with_nothing_finished_leaves_nothing(tmp_path: Path) -> None:
    def write(directory: Path) -> dict:
        (directory / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        produce(tmp_path / "out", identity(), write)
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def write(directory: Path) -> dict:
        finish(directory, "one", "1")
        raise ForgeError("no", hint="way")

    with pytest.raises(ForgeError):
        produce(tmp_path / "out", identity(), write)
    assert list(tmp_path.iterdir()) == []


def test_the_failure_of_another_program_leaves_what_was_finished(tmp_path: Path) -> None:
    def write(directory: Path) -> dict:
        finish(directory, "one", "1")
        (directory / "two").write_text("half")
        raise LoggedError("it ended", hint="way", log=tmp_path / "log")

    with pytest.raises(LoggedError):
        produce(tmp_path / "out", identity(), write)
    assert found_by_the_next_run(tmp_path / "out") == ["one"]


def test_finished_files_below_directories_stay(tmp_path: Path) -> None:
    directory = tmp_path / "partial"
    Finished.begin(directory, identity())
    (directory / "lora/0").mkdir(parents=True)
    finish(directory, "lora/0/adapter", "1")
    (directory / "lora/1").mkdir()
    (directory / "lora/1/adapter").write_text("half")
    Finished.begin(directory, identity())
    assert Finished.read(directory).names == {"lora/0/adapter"}
    assert sorted(path.name for path in (directory / "lora").iterdir()) == ["0"]
    assert (directory / "lora/0/adapter").read_text() == "1"


def test_force_starts_afresh(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    found: list[Path] = []

    def write(directory: Path) -> dict:
        found.extend(path for path in directory.iterdir() if path.name != RECORD)
        return {}

    produce(tmp_path / "out", identity(), write, force=True)
    assert found == []


def test_a_cache_hit_clears_away_what_a_kill_left(tmp_path: Path) -> None:
    made = produce(tmp_path / "out", identity(), lambda directory: {})
    shutil.copytree(tmp_path / "out", tmp_path / ".out.partial")
    shutil.copytree(tmp_path / "out", tmp_path / ".out.replaced")
    assert produce(tmp_path / "out", identity(), lambda directory: {}).manifest == made.manifest
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_groups_are_known_by_their_files(tmp_path: Path) -> None:
    directory = tmp_path / "partial"
    Finished.begin(directory, identity())
    first = finish(directory, "one", "1")
    second = finish(directory, "two", "22")
    finished = Finished.read(directory)
    assert finished.group({"one"}) == first
    assert finished.group({"two"}) == second
    assert finished.group({"one", "two"}) is None
    assert finished.bytes == 3


def test_a_file_that_is_made_again_has_one_group(tmp_path: Path) -> None:
    directory = tmp_path / "partial"
    Finished.begin(directory, identity())
    finish(directory, "one", "1", made_from="before")
    again = finish(directory, "one", "22", made_from="after")
    assert Finished.read(directory).group({"one"}) == again
    assert Finished.read(directory).bytes == 2


def test_a_partial_directory_that_is_deleted_meanwhile_is_named(tmp_path: Path) -> None:
    def write(directory: Path) -> dict:
        shutil.rmtree(directory)
        Finished.read(directory)
        return {}

    with pytest.raises(ForgeError) as caught:
        produce(tmp_path / "out", identity(), write)
    assert caught.value.message == f"{tmp_path}/.out.partial/.finished.json disappeared or cannot be read any more"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_deleted_while_files_are_written_is_named(tmp_path: Path) -> None:
    def write(directory: Path) -> dict:
        shutil.rmtree(directory)
        (directory / "one").write_text("1")
        return {}

    with pytest.raises(ForgeError, match=r"/\.out\.partial/one: No such file or directory") as caught:
        produce(tmp_path / "out", identity(), write)
    assert caught.value.hint.startswith("Let nothing else change that directory, then run again;")


def test_an_interruption_stays_one_where_the_record_was_deleted(tmp_path: Path) -> None:
    def write(directory: Path) -> dict:
        (directory / RECORD).write_text("damaged")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        produce(tmp_path / "out", identity(), write)
    assert list(tmp_path.iterdir()) == []
