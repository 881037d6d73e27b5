"""The front as a process: started, in the way of another, told to stop, left alone by a parent that was killed."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.patience import PATIENCE, eventually
from tests.ports import free_ports
from trtforge.serve.front_process import FrontCommand


def command(tmp_path: Path, **values: object) -> FrontCommand:
    port = free_ports(1)[0]
    return FrontCommand(**({"host": "127.0.0.1", "port": port, "upstream": f"unix:{tmp_path}/s"} | values))  # type: ignore[arg-type]


@contextmanager
def running(wanted: FrontCommand) -> Iterator["subprocess.Popen[str]"]:
    front = subprocess.Popen(wanted.argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield front
    finally:
        front.kill()
        front.communicate()


def listens(wanted: FrontCommand) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((wanted.host, wanted.port)) == 0


def test_it_answers_before_triton_does_and_stops_when_told(tmp_path: Path) -> None:
    wanted = command(tmp_path)
    with running(wanted) as front:
        assert eventually(lambda: listens(wanted))
        answer = httpx.get(f"http://127.0.0.1:{wanted.port}/v2/health/ready", timeout=PATIENCE)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        front.send_signal(signal.SIGTERM)
        assert front.communicate(timeout=PATIENCE)[0] == ""
        assert front.returncode == 0


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with running(command(tmp_path, port=port)) as front:
            said = front.communicate(timeout=PATIENCE)[0]
            assert front.returncode == 1
    assert said.startswith(f"error: the front cannot listen on 127.0.0.1:{port}: ")


def test_keys_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    with running(command(tmp_path, api_key_file=tmp_path / "none")) as front:
        said = front.communicate(timeout=PATIENCE)[0]
        assert front.returncode == 1
    assert "error: the API keys cannot be read" in said


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    wanted = command(tmp_path)
    program = f"import subprocess, time\nsubprocess.Popen({list(wanted.argv)!r})\ntime.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", program])
    assert eventually(lambda: listens(wanted))
    parent.kill()
    parent.wait()
    assert eventually(lambda: not listens(wanted))
