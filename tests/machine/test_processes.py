import os
import subprocess
import sys

from trtforge.machine.processes import end_session, lives_in, session_processes

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
