"""The reaper: ends and removes what a killed process had started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import eventually
from trtforge.machine.processes import session_processes
from trtforge.serve.reap import Remains

OWNER = """
import subprocess, sys, tempfile, pathlib
from trtforge.serve.reap import Remains
from trtforge.serve.reaper import Reaper
directory = tempfile.mkdtemp(prefix="trtforge-serve-0-")
pathlib.Path(sys.argv[1]).write_text("here")
with Reaper() as reaper:
    child = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 & wait"], start_new_session=True, stdout=sys.stderr)
    reaper.tell(Remains((child.pid,), (directory,), (("rm", sys.argv[1]),)))
    print(child.pid, reaper.pid, directory, flush=True)
    for line in sys.stdin:
        reaper.keep()
        print(reaper.pid, flush=True)
    child.kill()
"""


def start_owner(marker: Path) -> "tuple[subprocess.Popen[str], int, int, Path]":
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(marker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    child, reaper, directory = owner.stdout.readline().split()
    return owner, int(child), int(reaper), Path(directory)


def ignores(process: int, number: int) -> bool:
    line = next(x for x in Path(f"/proc/{process}/status").read_text().splitlines() if x.startswith("SigIgn:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_a_killed_process_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    owner, child, reaper, directory = start_owner(tmp_path / "marker")
    owner.kill()
    owner.communicate()
    assert eventually(lambda: not session_processes(child))
    assert eventually(lambda: not directory.exists() and not (tmp_path / "marker").exists())
    assert eventually(lambda: not session_processes(reaper))


def test_a_terminals_signals_do_not_end_it(tmp_path: Path) -> None:
    owner, child, reaper, _ = start_owner(tmp_path / "marker")
    assert eventually(lambda: all(ignores(reaper, number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(reaper, number)
    owner.kill()
    owner.communicate()
    assert eventually(lambda: not session_processes(child))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_reaper_is_replaced_by_one_that_knows_what_to_do(number: signal.Signals, tmp_path: Path) -> None:
    owner, child, first, directory = start_owner(tmp_path / "marker")
    assert owner.stdin is not None
    assert owner.stdout is not None
    os.kill(first, number)
    second = first
    while second == first:
        owner.stdin.write("keep\n")
        owner.stdin.flush()
        second = int(owner.stdout.readline())
    owner.kill()
    owner.communicate()
    assert eventually(lambda: not session_processes(child) and not directory.exists())
    assert eventually(lambda: not session_processes(first) and not session_processes(second))


def test_it_stays_small() -> None:
    heavy = "{'httpx', 'pydantic', 'grpc', 'numpy', 'torch'} & set(sys.modules)"
    code = f"import sys, trtforge.serve.reap; print(sorted({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_remains_travel_as_a_line() -> None:
    remains = Remains((1, 2), ("/tmp/a b",), (("docker", "rm", "x"),))
    assert Remains.decode(remains.encode()) == remains
    assert remains.encode().count(b"\n") == 1
