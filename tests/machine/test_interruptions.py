"""SIGTERM and SIGHUP become exceptions that clear away; a second SIGTERM ends at once; a fork dies as it did."""

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from trtforge.machine.interruptions import ended_by_signals
from trtforge.machine.processes import SIGHUP_STATUS, SIGTERM_STATUS

CLEANS = """
import os, signal, time
from trtforge.machine.interruptions import ended_by_signals
with ended_by_signals():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    finally:
        print("cleared", flush=True)
        if {twice}:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
"""


def test_it_is_an_exit_and_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end, ended_by_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert end.value.code == SIGTERM_STATUS == 143
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("twice", "status"), [(False, 143), (True, -signal.SIGTERM)])
def test_a_second_one_ends_at_once(twice: bool, status: int) -> None:
    program = [sys.executable, "-c", CLEANS.format(twice=twice)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (status, "cleared\n")


HANGS_UP = """
import os, signal, sys, time
from pathlib import Path
from trtforge.machine.interruptions import ended_by_signals
with ended_by_signals():
    try:
        print("begun", flush=True)
        time.sleep(600)
    finally:
        print("said on stdout", flush=True)
        print("said on stderr", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGHUP)
        Path(sys.argv[1]).touch()
"""


def test_a_terminal_that_is_closed_ends_nothing_of_the_clean_up(tmp_path: Path) -> None:
    cleared = tmp_path / "cleared"
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", HANGS_UP, str(cleared)])
    while b"begun" not in os.read(terminal, 1000):
        pass
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == SIGHUP_STATUS == 129
    assert cleared.exists()


def test_a_process_started_by_nohup_goes_on() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


LOADING = """
import os, signal, sys
from trtforge.machine.interruptions import ended_by_signals
class Ending:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.lib":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Ending())
with ended_by_signals():
    try:
        import ml_dtypes
        print("after it")
    finally:
        print("numpy.lib" in sys.modules, "cleared", flush=True)
"""


def test_an_import_is_ended_where_it_returns() -> None:
    """ml_dtypes, which tritonclient imports, calls exit() for a SystemExit in the numpy that it imports."""
    done = subprocess.run(
        [sys.executable, "-c", LOADING], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout) == (143, "True cleared\n")


def test_a_fork_does_not_clear_away_what_is_ours() -> None:
    with ended_by_signals():
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(7)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    found: list[object] = []

    def look() -> None:
        with ended_by_signals():
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with ended_by_signals():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
