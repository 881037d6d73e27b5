"""What is left of a server that was killed is found and removed, and nobody else's files are."""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trtforge.serve import processes
from trtforge.serve.processes import runtime_directory

HOLDER = """
import pathlib, sys
from trtforge.serve import processes
from trtforge.serve.processes import runtime_directory
processes._SHARED_MEMORY = pathlib.Path(sys.argv[1])
with runtime_directory() as path:
    print(path, flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Places:
    """Directories of the test's own: a server that starts meanwhile removes what is left in those of the machine."""

    tmp: Path
    shm: Path

    def traces(self, path: Path) -> list[Path]:
        """What there is of a runtime directory."""
        return [*self.tmp.glob(f"{path.name}*"), *self.shm.glob(f"{path.name}*")]


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """In the place of /tmp and /dev/shm."""
    found = Places(tmp_path / "tmp", tmp_path / "shm")
    found.tmp.mkdir()
    found.shm.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(found.tmp))
    monkeypatch.setattr(processes, "_SHARED_MEMORY", found.shm)
    return found


@pytest.fixture
def holder(places: Places) -> Iterator["subprocess.Popen[str]"]:
    """Another process with a runtime directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(places.shm)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(places.tmp)},
    )
    yield process
    process.communicate()


def path_of(holder: "subprocess.Popen[str]") -> Path:
    assert holder.stdout is not None
    return Path(holder.stdout.readline().strip())


def test_runtime_directory_goes_with_its_shared_memory(places: Places) -> None:
    with runtime_directory() as path:
        shared = places.shm / f"{path.name}_1"
        shared.write_bytes(b"x")
        (path / "log").write_text("")
    assert places.traces(path) == []


def test_what_a_killed_process_left_goes_at_the_next_start(holder: "subprocess.Popen[str]", places: Places) -> None:
    path = path_of(holder)
    (places.shm / f"{path.name}_1").write_bytes(b"x")
    holder.kill()
    holder.wait()
    assert path.is_dir()
    with runtime_directory():
        assert places.traces(path) == []


def test_what_a_living_process_holds_stays_whatever_its_process_id_is(
    holder: "subprocess.Popen[str]", places: Places
) -> None:
    """As seen from another container, where no process has this id."""
    path = path_of(holder)
    nobody = path.name.replace(str(holder.pid), "4194305")
    shared, lock = places.shm / f"{nobody}_1", places.shm / f"{nobody}.lock"
    shared.write_bytes(b"x")
    try:
        with lock.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with runtime_directory():
                assert shared.exists()
                assert path.is_dir()
        with runtime_directory():
            assert not shared.exists()
            assert not lock.exists()
            assert path.is_dir()
    finally:
        shared.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["trtforge-serve-", "trtforge-serve-1-abc", "trtforge-serve-1-*bcdefgh"])
def test_lock_files_with_other_names_say_nothing(name: str, places: Places) -> None:
    lock = places.tmp / f"{name}.lock"
    lock.write_bytes(b"")
    try:
        with runtime_directory() as path:
            assert path.is_dir()
            with runtime_directory():
                assert path.is_dir()
                assert lock.exists()
    finally:
        lock.unlink()


def test_shared_memory_without_a_lock_file_is_left_alone(places: Places) -> None:
    shared = places.shm / "trtforge-serve-1-abcdefgh_1"
    shared.write_bytes(b"x")
    try:
        with runtime_directory():
            assert shared.exists()
    finally:
        shared.unlink()
