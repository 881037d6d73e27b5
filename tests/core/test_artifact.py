"""Artifacts are whole or absent, cached where right, and never somebody else's files."""

import errno
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import eventually
from trtforge.core.artifact import produce, require_space
from trtforge.core.errors import ForgeError
from trtforge.core.locks import take_lock
from trtforge.core.manifest import Identity, open_artifact, read_manifest, record_of


def identity(**config: object) -> Identity:
    return Identity(stage="checkpoint", config=config, inputs={"a": "b"})


def writer(text: str, calls: list[str] | None = None):
    def write(directory: Path) -> dict:
        if calls is not None:
            calls.append(text)
        (directory / "sub").mkdir()
        (directory / "sub" / "data").write_text(text)
        return {}

    return write


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_artifact_records_every_file(tmp_path: Path) -> None:
    made = produce(tmp_path / "out", identity(), writer("x"))

    assert not made.cached
    assert list(made.manifest.files) == ["sub/data"]
    assert made.manifest.files["sub/data"].bytes == 1
    assert open_artifact(tmp_path / "out", "checkpoint") == made.manifest
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_are_open_to_whom_the_umask_lets_read(tmp_path: Path, umask: int) -> None:
    """Whatever a library wrote them through, as safetensors writes through a file of the user's alone."""

    def write(directory: Path) -> dict:
        for name, mode in (("closed", 0o600), ("program", 0o700)):
            (directory / name).write_text(name)
            (directory / name).chmod(mode)
        return {}

    before = os.umask(umask)
    try:
        made = produce(tmp_path / "out", identity(), write).path
    finally:
        os.umask(before)
    readers = 0o044 & ~umask
    modes = {path.name: path.stat().st_mode & 0o777 for path in made.iterdir()}
    assert modes == {"closed": 0o600 | readers, "program": 0o700 | readers, "forge.json": 0o600 | readers}


def test_a_file_that_is_linked_from_elsewhere_keeps_its_permissions(tmp_path: Path) -> None:
    """Private weights would become readable for everybody where they come from."""
    (tmp_path / "weights").write_text("w")
    (tmp_path / "weights").chmod(0o600)

    def write(directory: Path) -> dict:
        os.link(tmp_path / "weights", directory / "weights")
        return {}

    produce(tmp_path / "out", identity(), write)
    assert (tmp_path / "weights").stat().st_mode & 0o777 == 0o600


def test_same_identity_is_a_cache_hit(tmp_path: Path) -> None:
    calls: list[str] = []
    produce(tmp_path / "out", identity(), writer("x", calls))

    assert produce(tmp_path / "out", identity(), writer("x", calls)).cached
    assert calls == ["x"]


def test_force_makes_it_again(tmp_path: Path) -> None:
    calls: list[str] = []
    produce(tmp_path / "out", identity(), writer("x", calls))
    produce(tmp_path / "out", identity(), writer("x", calls), force=True)
    assert calls == ["x", "x"]


def test_other_identity_replaces(tmp_path: Path) -> None:
    old = produce(tmp_path / "out", identity(tp=1), writer("x"))
    new = produce(tmp_path / "out", identity(tp=2), writer("y"))
    assert (tmp_path / "out/sub/data").read_text() == "y"
    assert (old.replaced, new.replaced) == (None, old.manifest)
    assert produce(tmp_path / "out", identity(tp=2), writer("y")).replaced is None
    assert names(tmp_path) == ["out"]


def test_changed_file_is_made_again(tmp_path: Path) -> None:
    produce(tmp_path / "out", identity(), writer("x"))
    (tmp_path / "out/sub/data").write_text("z")
    assert not produce(tmp_path / "out", identity(), writer("x")).cached
    assert (tmp_path / "out/sub/data").read_text() == "x"


def test_failure_leaves_what_was_there(tmp_path: Path) -> None:
    produce(tmp_path / "out", identity(tp=1), writer("x"))

    def fail(directory: Path) -> dict:
        (directory / "half").write_text("half")
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        produce(tmp_path / "out", identity(tp=2), fail)
    assert (tmp_path / "out/sub/data").read_text() == "x"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Free space or choose another directory, then run again"),
        (errno.EIO, "Check the disk or network share that it is on, then run again"),
        (errno.ENOENT, "Let nothing else change that directory, then run again"),
    ],
)
def test_an_error_of_the_disk_names_the_file_and_what_helps(tmp_path: Path, number: int, remedy: str) -> None:
    produce(tmp_path / "out", identity(tp=1), writer("x"))

    def fail(directory: Path) -> dict:
        raise OSError(number, os.strerror(number), str(directory / "rank0"))

    with pytest.raises(ForgeError, match=rf"rank0: {os.strerror(number)}$") as caught:
        produce(tmp_path / "out", identity(tp=2), fail)
    assert caught.value.hint == f"{remedy}; the previous content is unchanged."
    assert names(tmp_path) == ["out"]


def test_interrupted_replacement_is_taken_back(tmp_path: Path) -> None:
    produce(tmp_path / "out", identity(), writer("x"))
    (tmp_path / "out").rename(tmp_path / ".out.replaced")  # killed between the two renames
    assert produce(tmp_path / "out", identity(), writer("x")).cached


@pytest.mark.parametrize("force", [False, True])
def test_strangers_files_are_never_deleted(tmp_path: Path, force: bool) -> None:
    produce(tmp_path / "out", identity(tp=1), writer("x"))
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(ForgeError, match=r"did not write \(notes.txt\)"):
        produce(tmp_path / "out", identity(tp=2), writer("y"), force=force)
    assert (tmp_path / "out/notes.txt").read_text() == "mine"


def test_directory_without_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("years")
    with pytest.raises(ForgeError, match="did not write"):
        produce(tmp_path / "out", identity(), writer("x"))


def test_manifest_is_deterministic(tmp_path: Path) -> None:
    first = produce(tmp_path / "a", identity(tp=2, pp=1), writer("x"))
    second = produce(tmp_path / "b", identity(pp=1, tp=2), writer("x"))
    assert (first.path / "forge.json").read_bytes() == (second.path / "forge.json").read_bytes()


def test_damaged_artifact_is_refused(tmp_path: Path) -> None:
    out = produce(tmp_path / "out", identity(), writer("x")).path
    (out / "sub/data").write_text("y")
    with pytest.raises(ForgeError, match="was changed after it was written"):
        open_artifact(out, "checkpoint")
    (out / "sub/data").unlink()
    with pytest.raises(ForgeError, match="is missing"):
        open_artifact(out, "checkpoint")


def test_artifact_of_another_stage_is_refused(tmp_path: Path) -> None:
    out = produce(tmp_path / "out", identity(), writer("x")).path
    with pytest.raises(ForgeError, match="is the result of stage checkpoint, engine is required"):
        open_artifact(out, "engine")


def test_damaged_manifest_is_named(tmp_path: Path) -> None:
    out = produce(tmp_path / "out", identity(), writer("x")).path
    (out / "forge.json").write_text("{")
    with pytest.raises(ForgeError, match=r"forge.json: not JSON"):
        read_manifest(out)


@pytest.mark.parametrize("name", ["../data", "a/../../data", "/etc/passwd", ""])
def test_a_manifest_lists_only_files_below_its_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "data").write_text("x")
    out = produce(tmp_path / "out", identity(), writer("x")).path
    manifest = read_manifest(out)
    assert manifest is not None
    manifest.files[name] = record_of(tmp_path / "data")
    manifest.write(out)
    with pytest.raises(ForgeError, match=r"forge.json: '.*' is not the path of a file below"):
        open_artifact(out, "checkpoint")


def _produce_slowly(out: Path, log: Path) -> None:
    def write(directory: Path) -> dict:
        with log.open("a") as file:
            file.write("made\n")
        (directory / "data").write_text("x" * 1000)
        return {}

    produce(out, identity(), write)


def test_concurrent_builds_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    jobs = [context.Process(target=_produce_slowly, args=(tmp_path / "out", log)) for _ in range(6)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0] * 6
    assert log.read_text() == "made\n"
    assert names(tmp_path) == ["log", "out"]


def test_who_waits_for_the_same_output_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    descriptor = take_lock(tmp_path / ".out.lock")
    thread = threading.Thread(target=produce, args=(tmp_path / "out", identity(), writer("x")), daemon=True)
    thread.start()
    assert eventually(lambda: bool(caplog.messages))
    assert caplog.messages == [f"another process is writing {tmp_path / 'out'}: waiting for it"]
    assert not (tmp_path / "out").exists()
    os.close(descriptor)
    thread.join()
    assert (tmp_path / "out/sub/data").read_text() == "x"


def test_result_of_another_stage_is_never_replaced(tmp_path: Path) -> None:
    made = produce(tmp_path / "out", identity(), writer("x"))
    with pytest.raises(ForgeError, match="is the result of another stage: checkpoint, not engine"):
        produce(tmp_path / "out", Identity(stage="engine"), writer("y"), force=True)
    assert open_artifact(tmp_path / "out", "checkpoint") == made.manifest


def test_symlink_stays_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk", target_is_directory=True)
    for number in range(2):
        produce(tmp_path / "out", identity(number=number), writer("x"))
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk/sub/data").read_text() == "x"
    assert names(tmp_path) == ["disk", "out"]


def test_full_disk_is_an_error_with_a_hint(tmp_path: Path) -> None:
    def write(directory: Path) -> dict:
        (directory / "half").write_text("half")
        raise OSError(28, "No space left on device", str(directory / "half"))

    with pytest.raises(ForgeError, match="No space left on device") as caught:
        produce(tmp_path / "out", identity(), write)
    assert "Free space" in caught.value.hint
    assert names(tmp_path) == []

    def copy(directory: Path) -> dict:
        raise OSError(28, "No space left on device", "/elsewhere/source", None, str(directory / "copy"))

    with pytest.raises(ForgeError, match=rf"{tmp_path}/\.out\.partial/copy: No space left on device"):
        produce(tmp_path / "out", identity(), copy)


def test_late_inputs_are_asked_for_after_the_work(tmp_path: Path) -> None:
    calls: list[str] = []

    def late() -> dict[str, str]:
        calls.append("digests")
        return {"weights": "w"}

    made = produce(tmp_path / "out", identity(), writer("work", calls), late_inputs=late)

    assert calls == ["work", "digests"]
    assert made.manifest.identity.inputs == {"a": "b", "weights": "w"}


@pytest.mark.parametrize(("weights", "cached"), [("w", True), ("other", False)])
def test_late_inputs_decide_where_all_else_is_equal(tmp_path: Path, weights: str, cached: bool) -> None:
    produce(tmp_path / "out", identity(), writer("x"), late_inputs=lambda: {"weights": "w"})
    again = produce(tmp_path / "out", identity(), writer("x"), late_inputs=lambda: {"weights": weights})
    assert again.cached is cached
    assert again.manifest.identity.inputs["weights"] == weights


def test_late_inputs_are_not_asked_for_where_something_else_differs(tmp_path: Path) -> None:
    calls: list[str] = []

    def late() -> dict[str, str]:
        calls.append("digests")
        return {}

    produce(tmp_path / "out", identity(tp=1), writer("x"))
    produce(tmp_path / "out", identity(tp=2), writer("work", calls), late_inputs=late)
    assert calls == ["work", "digests"]


def test_what_late_inputs_refuse_is_not_published(tmp_path: Path) -> None:
    produce(tmp_path / "out", identity(tp=1), writer("x"))

    def late() -> dict[str, str]:
        raise ForgeError("the source changed", hint="Run again.")

    with pytest.raises(ForgeError, match="the source changed"):
        produce(tmp_path / "out", identity(tp=2), writer("y"), late_inputs=late)
    assert (tmp_path / "out/sub/data").read_text() == "x"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [OSError(16, "Device or resource busy"), KeyboardInterrupt()])
def test_what_was_there_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    produce(tmp_path / "out", identity(tp=1), writer("x"))
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == ".out.partial":
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises((ForgeError, KeyboardInterrupt)):
        produce(tmp_path / "out", identity(tp=2), writer("y"))
    assert (tmp_path / "out/sub/data").read_text() == "x"
    assert names(tmp_path) == ["out"]


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    def write(directory: Path) -> dict:
        require_space(directory, 1 << 60)
        raise AssertionError("unreachable")

    with pytest.raises(ForgeError, match=r"1,152,921,504,606,846,976 bytes are needed, [\d,]+ are free") as caught:
        produce(tmp_path / "out", identity(), write)
    assert "another disk" in caught.value.hint
    assert names(tmp_path) == []


@pytest.fixture
def as_nobody(tmp_path: Path) -> Iterator[None]:
    """Permissions mean nothing to root."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_read_only_target_is_an_error_with_a_hint(tmp_path: Path, as_nobody: None) -> None:
    if os.access(tmp_path, os.W_OK, effective_ids=True):
        tmp_path.chmod(0o555)
    with pytest.raises(ForgeError, match="cannot write there: Permission denied") as caught:
        produce(tmp_path / "out", identity(), writer("x"))
    assert "may write to" in caught.value.hint


def test_the_current_directory_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    produce(Path(), identity(), writer("one"))
    assert Path.cwd() == tmp_path / "here"
    assert open_artifact(Path(), "checkpoint") == open_artifact(tmp_path / "here", "checkpoint")
