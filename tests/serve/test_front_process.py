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


def test_web_pages_of_others_do_not_reach_a_front_on_loopback(tmp_path: Path) -> None:
    """503: the request went on to Triton, which does not run here."""
    wanted = command(tmp_path, allowed_hosts=("llm.example",))
    url, body = f"http://127.0.0.1:{wanted.port}/v2/models/ensemble/generate", b'{"text_input":"a"}'

    def status(**headers: str) -> int:
        return httpx.post(url, content=body, headers=headers, timeout=PATIENCE).status_code

    with running(wanted):
        assert eventually(lambda: listens(wanted))
        assert [status(), status(host="localhost:8000"), status(host="llm.example")] == [503, 503, 503]
        assert [status(host="evil.example"), status(origin="https://evil.example")] == [403, 403]
        answer = httpx.post(url, content=body, headers={"host": "evil.example"}, timeout=PATIENCE)
        assert answer.json()["error"].startswith("the Host 'evil.example' is not allowed: ")
        health = f"http://127.0.0.1:{wanted.port}/v2/health/ready"
        assert httpx.get(health, headers={"host": "evil.example"}, timeout=PATIENCE).status_code == 503


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    wanted = command(tmp_path)
    program = f"import subprocess, time\nsubprocess.Popen({list(wanted.argv)!r})\ntime.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", program])
    assert eventually(lambda: listens(wanted))
    parent.kill()
    parent.wait()
    assert eventually(lambda: not listens(wanted))
