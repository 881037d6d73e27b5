"""Starting a server in the background: it is told of until it is ready, and nothing is left of one that is not."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.patience import PATIENCE, eventually
from tests.serve.detached.conftest import Background, command, recorded
from trtforge.core.errors import ForgeError
from trtforge.core.locks import take_lock
from trtforge.machine.processes import stat_of
from trtforge.serve.config import ServeConfig
from trtforge.serve.detached.places import new_name
from trtforge.serve.detached.process import Log
from trtforge.serve.detached.registry import Registry
from trtforge.serve.detached.start import NotReadyError, require_unserved
from trtforge.serve.detached.stop import ask, chosen
from trtforge.serve.log_limit import MOST_BYTES

STARTER = """
import sys
from pathlib import Path
from trtforge.serve.announcements import Printed
from trtforge.serve.config import ServeConfig
from trtforge.serve.detached.start import start
config = ServeConfig(http_port=1, grpc_port=2, metrics_port=3)
start(config, Path("demo"), sys.argv[1:], Printed(), lambda line: print(line, flush=True))
"""


def test_a_server_is_told_of_until_it_is_ready(background: Background, tmp_path: Path) -> None:
    server = background.start("ready", tmp_path / "demo" / "repository")
    assert background.heard.lines == [
        "ready 127.0.0.1:1 127.0.0.1:2 127.0.0.1:3",
        "openai http://127.0.0.1:4/v1",
        "complete ['ask it']",
    ]
    pid = server.record.pid
    assert (server.name, os.getsid(pid), server.record.process.is_here()) == ("demo", pid, True)
    assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
    record = json.loads((background.registry.directory("demo") / "record.json").read_text())
    assert (record["state"], record["openai"], record["restarts"]) == ("ready", "http://127.0.0.1:4/v1", 0)
    assert [background.registry.root.stat().st_mode & 0o777, server.log.stat().st_mode & 0o777] == [0o700, 0o600]
    dated = [line.partition(" ")[2] for line in server.log.read_text().splitlines()]
    assert dated == [
        f"starting, process {pid}",
        "ready http=127.0.0.1:1 grpc=127.0.0.1:2 metrics=127.0.0.1:3",
        "openai=http://127.0.0.1:4/v1",
    ]


def test_a_log_that_is_full_begins_again(background: Background, tmp_path: Path) -> None:
    server = background.start("logs", tmp_path / "demo")
    first = server.log.read_bytes()
    os.truncate(server.log, MOST_BYTES + 1)
    assert eventually(lambda: server.log.stat().st_size == 0)
    older = server.log.with_name("log.1")
    assert (older.stat().st_size, older.stat().st_mode & 0o777) == (MOST_BYTES + 1, 0o600)
    assert older.open("rb").read(len(first)) == first
    os.kill(server.record.pid, signal.SIGTERM)
    assert eventually(lambda: b" draining\n" in server.log.read_bytes())
    assert b"\0" not in server.log.read_bytes()
    assert eventually(lambda: not background.registry.is_alive("demo"))
    background.registry.remove_ended("demo")
    assert background.left() == []


def test_a_server_that_fails_shows_why_and_leaves_nothing(background: Background, tmp_path: Path) -> None:
    with pytest.raises(NotReadyError) as failed:
        background.start("fails", tmp_path)
    assert failed.value.status == 1
    assert background.heard.lines == ["note: loading", "error: no memory"]
    assert background.left() == []


def test_a_killed_server_is_missed(background: Background, tmp_path: Path) -> None:
    def kill() -> None:
        assert eventually(lambda: background.heard.lines == ["note: loading"])
        (server,) = background.registry.seen()
        assert server.record is not None
        os.kill(server.record.pid, signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        with pytest.raises(ForgeError, match="demo was ended by SIGKILL before it was ready"):
            background.start("slow", tmp_path / "demo")
        killed.result()
    assert background.left() == []


def test_a_server_that_is_stopped_while_it_starts_is_not_ready(background: Background, tmp_path: Path) -> None:
    def stop() -> None:
        assert eventually(lambda: background.heard.lines == ["note: loading"])
        ask(background.registry, chosen(background.registry, None))

    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(stop)
        with pytest.raises(ForgeError, match="demo was stopped before it was ready"):
            background.start("slow", tmp_path / "demo")
        stopped.result()
    assert background.heard.lines[-1] == "stopped before it was ready"
    assert background.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_the_command_that_starts_it_unless_it_is_ready(
    background: Background, number: signal.Signals
) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, *command("slow")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == "note: loading\n"
    (server,) = background.registry.seen()
    assert server.record is not None
    pid = server.record.pid
    starter.send_signal(number)
    starter.communicate(timeout=PATIENCE)
    assert eventually(lambda: (stat := stat_of(pid)) is None or stat.ended)
    assert eventually(lambda: background.left() == [])


def test_what_was_never_ready_is_removed_by_the_next_look(background: Background) -> None:
    (background.registry.root / "demo").mkdir(parents=True)
    (background.registry.root / "demo" / "log").touch()
    assert background.registry.seen() == []
    assert background.left() == []


def test_of_two_on_the_same_ports_one_starts(background: Background, tmp_path: Path) -> None:
    together = threading.Barrier(2)

    def begin() -> str:
        together.wait()
        try:
            return background.start("ready", tmp_path / "demo").name
        except ForgeError as error:
            return error.message

    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(begin) for _ in range(2)]
        said = sorted((each.result() for each in starts), key=len)
    assert said[0] == "demo"
    assert said[1].startswith(f"{tmp_path}/demo is served on these ports already: demo is ")


def test_a_port_of_another_server_is_refused_also_on_all_addresses(background: Background, tmp_path: Path) -> None:
    background.start("ready", tmp_path / "demo")
    with pytest.raises(ForgeError) as refused:
        background.start("ready", tmp_path / "other", host="0.0.0.0", http_port=2, grpc_port=5, metrics_port=6)
    assert refused.value.message == f"in use by the server demo ({tmp_path}/demo): 0.0.0.0:2"
    assert refused.value.hint == "End it with `trtforge stop demo`, or choose other ports."
    assert background.start("ready", tmp_path / "demo", http_port=4, grpc_port=5, metrics_port=6).name == "demo-2"


def test_a_server_of_another_machine_is_not_in_the_way(background: Background, tmp_path: Path) -> None:
    recorded(background.registry, "demo", os.getpid(), boot="another", machine="node7")
    lock = take_lock(background.registry.directory("demo") / "lock")
    require_unserved(ServeConfig(http_port=1, grpc_port=2, metrics_port=3), tmp_path, background.registry.seen())
    os.close(lock)


@pytest.mark.parametrize(
    ("path", "taken", "name"),
    [
        ("build/llama-8b/repository", (), "llama-8b"),
        ("models/Qwen 3 (fp8)", (), "Qwen-3-fp8"),
        ("demo", ("demo", "demo-2"), "demo-3"),
        ("repository", ("demo",), "tmp"),
        (".../..ü", (), "repository"),
    ],
)
def test_names_come_from_builds_and_directories(path: str, taken: tuple[str, ...], name: str) -> None:
    assert new_name(Path("/tmp") / path, taken) == name


def test_a_full_disk_does_not_end_a_server() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        log = Log(full.fileno())
        for _ in range(2):
            print("2026-11-27T18:24:49Z draining", file=log, flush=True)


def test_a_directory_that_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(ForgeError, match=r"the state of servers cannot be kept in .*: Not a directory") as refused:
        Background(Registry.of_user()).start("ready", tmp_path)
    assert "Set XDG_STATE_HOME" in refused.value.hint
