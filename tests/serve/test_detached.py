"""`trtforge serve --detach`, `status` and `stop` with the real Triton server."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.patience import PATIENCE, eventually
from tests.ports import free_ports
from tests.serve.conftest import left_behind
from tests.serve.fake_engine import SLOW_WHILE
from tests.serve.test_supervision import is_free
from trtforge.core.api_keys import KEY_VARIABLE
from trtforge.machine.processes import session_processes
from trtforge.serve.client import Sampling, stream_text
from trtforge.serve.detached.registry import Registry
from trtforge.serve.detached.status import status_of

KEY = "a-key-of-more-than-16-characters"


@dataclass(frozen=True)
class User:
    """Somebody with a state directory, who is in another one."""

    directory: Path
    repository: Path
    ports: tuple[int, ...]

    @property
    def registry(self) -> Registry:
        """The servers of the user."""
        return Registry(self.directory / "state" / "trtforge" / "servers")

    def trtforge(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """The program, as a terminal runs it."""
        slow, state = str(self.directory / "slow"), str(self.directory / "state")
        return subprocess.run(
            [sys.executable, "-m", "trtforge", *words],
            cwd=self.directory,
            env=os.environ | {"XDG_STATE_HOME": state, SLOW_WHILE: slow, KEY_VARIABLE: KEY},
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
        )

    def serve(self, *options: str) -> "subprocess.CompletedProcess[str]":
        """`serve --detach` on the ports."""
        names = ("--http-port", "--grpc-port", "--metrics-port")
        ports = [word for name, port in zip(names, self.ports, strict=True) for word in (name, str(port))]
        return self.trtforge("serve", os.path.relpath(self.repository, self.directory), "--detach", *ports, *options)


@pytest.fixture
def user(fake_repository: Path, tmp_path: Path) -> Iterator[User]:
    """A user whose servers end with the test."""
    (tmp_path / "keys").write_text(f"{KEY}\n")
    found = User(tmp_path, fake_repository, tuple(free_ports(3)))
    yield found
    for server in found.registry.seen():
        if server.alive and server.record is not None:
            os.kill(server.record.pid, signal.SIGKILL)


def test_errors_and_exit_statuses_are_those_of_the_foreground(user: User) -> None:
    wrong = user.serve("--no-openai", "--openai-port", str(user.ports[0] + 3))
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.splitlines()[-2] == "error: --openai-port and --no-openai exclude each other"
    assert list(user.registry.root.iterdir()) == []


def test_a_server_in_the_background_serves_until_it_is_stopped(user: User) -> None:
    """One server for all: it starts in some seconds."""
    http, grpc, metrics = (f"127.0.0.1:{port}" for port in user.ports)
    started = user.serve("--no-openai", "--api-key-file", "keys", "--drain-timeout", str(PATIENCE))
    assert started.returncode == 0, started.stderr
    ready, last = started.stdout.splitlines()
    assert ready == f"ready http={http} grpc={grpc} metrics={metrics}"
    found = re.fullmatch(r"name=(\S+) pid=(\d+) log=(.*)", last)
    assert found is not None
    name, pid, log = found[1], int(found[2]), Path(found[3])
    assert name == user.repository.parent.name
    assert started.stderr.splitlines()[-4:] == [
        f"{name} runs in the background:",
        f"trtforge chat --url {grpc}",
        f"trtforge status {name}",
        f"trtforge stop {name}",
    ]
    assert KEY not in "".join(path.read_text() for path in log.parent.iterdir())

    shown = json.loads(user.trtforge("status", name, "--json").stdout)["servers"]
    assert [(each["state"], each["pid"], each["openai"]) for each in shown] == [("ready", pid, None)]
    (user.directory / "slow").touch()
    begun = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        answer = pool.submit(_streamed, grpc, begun)
        assert begun.wait(PATIENCE)
        stops = [pool.submit(user.trtforge, "stop", *words) for words in ((), (name, "--json"))]
        assert eventually(lambda: [status_of(server).state for server in user.registry.seen()] == ["draining"])
        (user.directory / "slow").unlink()
        assert answer.result().count("one two three") == 8
        said, as_json = (each.result() for each in stops)
    line = "stopped: 1 request finished while draining, 0 cut"
    assert (said.returncode, said.stdout, said.stderr) == (0, f"{name}: {line}\n", "")
    assert json.loads(as_json.stdout)["servers"] == [
        {"name": name, "outcome": "stopped", "reason": line, "exit_status": 0}
    ]
    assert not log.parent.exists()
    assert not session_processes(pid)
    assert all(is_free(address) for address in (http, grpc, metrics))
    assert left_behind(pid) == []


def test_ports_of_zero_are_chosen_before_the_start(user: User) -> None:
    zero = [word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}-port", "0")]
    repository = os.path.relpath(user.repository, user.directory)
    started = user.trtforge("serve", "--detach", *zero, "--", repository)
    assert started.returncode == 0, started.stderr
    ready, openai, _ = started.stdout.splitlines()
    addresses = [word.partition("=")[2] for word in [*ready.split()[1:], openai.removesuffix("/v1")]]
    found = {address.removeprefix("http://") for address in addresses}
    assert len(found) == 4
    (server,) = user.registry.seen()
    assert server.record is not None
    assert found == {f"127.0.0.1:{port}" for port in server.record.ports.values()}
    assert "0" not in {address.rpartition(":")[2] for address in found}
    assert httpx.get(f"{openai.removeprefix('openai=')}/models", timeout=PATIENCE).status_code == 200
    assert user.trtforge("stop", server.name).returncode == 0
    assert all(is_free(address) for address in found)


def _streamed(grpc: str, begun: threading.Event) -> str:
    text = ""
    for piece in stream_text(grpc, "ensemble", "one two three", Sampling(max_tokens=40)):
        text += piece
        begun.set()
    return text
