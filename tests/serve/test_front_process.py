"""The front as a process: started, in the way of another, told to stop, left alone by a parent that was killed."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.serve.conftest import eventually, free_ports
from trtforge.core.errors import ForgeError
from trtforge.serve.front_process import FrontCommand, FrontProcess


def command(tmp_path: Path, **values: object) -> FrontCommand:
    port = free_ports(1)[0]
    return FrontCommand(**({"host": "127.0.0.1", "port": port, "upstream": f"unix:{tmp_path}/s"} | values))  # type: ignore[arg-type]


def test_it_answers_before_triton_does_and_stops_when_told(tmp_path: Path) -> None:
    wanted = command(tmp_path)
    front = FrontProcess(wanted, tmp_path / "log")
    try:
        front.wait_ready()
        answer = httpx.get(f"http://127.0.0.1:{wanted.port}/v2/health/ready")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        front.stop_accepting()
        assert eventually(lambda: front.poll() == 0)
    finally:
        front.end()
    assert (tmp_path / "log").read_text() == ""


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        front = FrontProcess(command(tmp_path, port=port), tmp_path / "log")
        try:
            assert eventually(lambda: front.poll() == 1)
            with pytest.raises(ForgeError, match=f"the front cannot listen on 127.0.0.1:{port}") as caught:
                front.wait_ready()
        finally:
            front.end()
    assert caught.value.hint == f"Choose another --http-port if {port} is in use."


def test_keys_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    front = FrontProcess(command(tmp_path, api_key_file=tmp_path / "none"), tmp_path / "log")
    try:
        with pytest.raises(ForgeError, match="the API keys cannot be read"):
            front.wait_ready()
    finally:
        front.end()


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    wanted = command(tmp_path)
    program = f"""
import time
from pathlib import Path
from trtforge.serve.front_process import FrontCommand, FrontProcess
front = FrontProcess(FrontCommand("127.0.0.1", {wanted.port}, "unix:/none"), Path({str(tmp_path / "log")!r}))
front.wait_ready()
print(front.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    status = Path(f"/proc/{pid}/stat")
    assert eventually(lambda: not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z")
