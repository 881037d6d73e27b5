"""What is left of a server that was killed is found and removed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from trtforge.serve.processes import end_session, lives_in, runtime_directory, session_processes

SLEEPER = [sys.executable, "-c", "import subprocess, sys; subprocess.Popen(['sleep', '60']); sys.stdin.read()"]


def test_a_session_ends_with_everything_in_it() -> None:
    leader = subprocess.Popen(SLEEPER, start_new_session=True, stdin=subprocess.PIPE)
    try:
        while "sleep" not in session_processes(leader.pid).values():
            assert leader.poll() is None
        assert lives_in(leader.pid, leader.pid)
        assert not lives_in(os.getpid() + 10**7, leader.pid)
    finally:
        end_session(leader.pid)
    leader.wait()
    assert session_processes(leader.pid) == {}
    assert not lives_in(leader.pid, leader.pid)
    assert leader.stdin is not None
    leader.stdin.close()


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
