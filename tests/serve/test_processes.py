"""What is left of a server that was killed is found and removed, and nobody else's files are."""

import fcntl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtforge.serve.processes import runtime_directory

SHM = Path("/dev/shm")
TMP = Path(tempfile.gettempdir())
HOLDER = """
import sys, time
from trtforge.serve.processes import runtime_directory
with runtime_directory() as path:
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator["subprocess.Popen[str]"]:
    """Another process with a runtime directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.communicate()


def path_of(holder: "subprocess.Popen[str]") -> Path:
    assert holder.stdout is not None
    return Path(holder.stdout.readline().strip())


def test_runtime_directory_goes_with_its_shared_memory() -> None:
    with runtime_directory() as path:
        shared = SHM / f"{path.name}_1"
        shared.write_bytes(b"x")
        (path / "log").write_text("")
    assert [*TMP.glob(f"{path.name}*"), *SHM.glob(f"{path.name}*")] == []


def test_what_a_killed_process_left_goes_at_the_next_start(holder: "subprocess.Popen[str]") -> None:
    path = path_of(holder)
    (SHM / f"{path.name}_1").write_bytes(b"x")
    holder.kill()
    holder.wait()
    assert path.is_dir()
    with runtime_directory():
        assert [*TMP.glob(f"{path.name}*"), *SHM.glob(f"{path.name}*")] == []


def test_what_a_living_process_holds_stays_whatever_its_process_id_is(holder: "subprocess.Popen[str]") -> None:
    """As seen from another container, where no process has this id."""
    path = path_of(holder)
    nobody = path.name.replace(str(holder.pid), "4194305")
    shared, lock = SHM / f"{nobody}_1", SHM / f"{nobody}.lock"
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
def test_lock_files_with_other_names_say_nothing(name: str) -> None:
    lock = TMP / f"{name}.lock"
    lock.write_bytes(b"")
    try:
        with runtime_directory() as path:
            assert path.is_dir()
            with runtime_directory():
                assert path.is_dir()
                assert lock.exists()
    finally:
        lock.unlink()


def test_shared_memory_without_a_lock_file_is_left_alone() -> None:
    shared = SHM / "trtforge-serve-1-abcdefgh_1"
    shared.write_bytes(b"x")
    try:
        with runtime_directory():
            assert shared.exists()
    finally:
        shared.unlink()
