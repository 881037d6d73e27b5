"""What is left of a server that was killed is found and removed."""

import os
import subprocess
import tempfile
from pathlib import Path

from trtforge.serve.processes import runtime_directory


def test_runtime_directory_goes_with_its_shared_memory() -> None:
    with runtime_directory() as path:
        shared = Path("/dev/shm") / f"{path.name}_1"
        shared.write_bytes(b"x")
        (path / "log").write_text("")
    assert not path.exists()
    assert not shared.exists()


def test_what_killed_processes_left_goes_at_the_next_start() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale = Path(tempfile.gettempdir()) / f"trtforge-serve-{ended.pid}-x"
    shared = Path("/dev/shm") / f"trtforge-serve-{ended.pid}-x_1"
    alive = Path(tempfile.gettempdir()) / f"trtforge-serve-{os.getpid()}-other"
    for directory in (stale, alive):
        directory.mkdir()
    shared.write_bytes(b"x")
    with runtime_directory():
        assert not stale.exists()
        assert not shared.exists()
        assert alive.exists()
    alive.rmdir()
