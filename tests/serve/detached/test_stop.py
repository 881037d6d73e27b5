"""Stopping a server in the background: asked once, waited for, killed if it must be, and never another process."""

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.patience import eventually
from tests.serve.detached.conftest import Background, recorded
from trtforge.core.errors import ForgeError
from trtforge.core.locks import take_lock
from trtforge.machine.processes import boot_of_machine, identity_of
from trtforge.serve.detached import stop as stopping
from trtforge.serve.detached.registry import Registry
from trtforge.serve.detached.status import status_of
from trtforge.serve.detached.stop import Stopped, _taken, ask, chosen, wait


def stopped(registry: Registry, name: str | None = None) -> Stopped:
    server = chosen(registry, name)
    ask(registry, server)
    return wait(registry, server)


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that has nothing to do with servers."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ("cuts", Stopped("demo", "stopped", "stopped: 1 request finished while draining, 2 cut", 1)),
        ("breaks", Stopped("demo", "failed", "the engine ended:\nout of memory", 1)),
    ],
)
def test_it_says_what_became_of_the_server(
    background: Background, tmp_path: Path, behaviour: str, expected: Stopped
) -> None:
    background.start(behaviour, tmp_path / "demo")
    found = stopped(background.registry)
    assert (found, found.is_clean) == (expected, False)
    assert background.left() == []


def test_a_server_that_does_not_end_is_killed(
    background: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "MARGIN", 0.3)
    server = background.start("stubborn", tmp_path / "demo")
    found = stopped(background.registry, "demo")
    assert found == Stopped("demo", "killed", "it did not end within 0.3 s", None)
    assert not found.is_clean
    assert not server.record.process.is_here()
    assert background.left() == []


def test_a_server_is_signalled_once_however_often_it_is_stopped(
    background: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    kill = os.kill
    server = background.start("ready", tmp_path / "demo")
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    found = chosen(background.registry, None)
    ask(background.registry, found)
    ask(background.registry, found)
    assert sent == [(server.record.pid, signal.SIGTERM)]
    monkeypatch.undo()
    waiting = take_lock(background.registry.directory("demo") / "waiting", shared=True)  # as a third one
    kill(server.record.pid, signal.SIGTERM)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(wait, background.registry, found) for _ in range(2)]
        assert [each.result().reason for each in both] == ["stopped", "stopped"]
    os.close(waiting)


def test_the_last_who_waits_removes_the_record(background: Background) -> None:
    ended = recorded(background.registry, "demo", os.getpid(), state="stopped", reason="stopped", exit_status=0)
    place = background.registry.directory("demo") / "waiting"
    waiting = [take_lock(place, shared=True) for _ in range(2)]
    left = []
    for descriptor in waiting:
        assert _taken(background.registry, "demo", ended, descriptor) == ended
        left.append(background.left())
        os.close(descriptor)
    assert left == [["demo"], []]


def test_what_failed_stays_with_its_reason_until_it_is_stopped(background: Background, tmp_path: Path) -> None:
    server = background.start("breaks", tmp_path / "demo")
    os.kill(server.record.pid, signal.SIGTERM)
    assert eventually(lambda: not background.registry.is_alive("demo"))
    status = status_of(background.registry.seen()[0])
    assert (status.state, status.reason, status.hint) == ("failed", "the engine ended:\nout of memory", "Lower it.")
    assert "error: the engine ended" in server.log.read_text()
    assert stopped(background.registry) == Stopped("demo", "had ended", "the engine ended:\nout of memory", None)
    assert background.left() == []


def test_restarts_are_counted_and_their_reason_is_forgotten(background: Background, tmp_path: Path) -> None:
    server = background.start("restarts", tmp_path / "demo")
    os.kill(server.record.pid, signal.SIGUSR1)
    assert eventually(lambda: (record := background.registry.record("demo")) is not None and record.restarts == 1)
    assert eventually(lambda: (record := background.registry.record("demo")) is not None and record.state == "ready")
    record = background.registry.record("demo")
    assert record is not None
    assert record.reason == ""
    log = [line.partition(" ")[2] for line in server.log.read_text().splitlines()]
    assert "restarting: the engine ended:" in log
    assert stopped(background.registry).is_clean


def test_a_killed_server_is_not_ready(background: Background, tmp_path: Path) -> None:
    server = background.start("ready", tmp_path / "demo")
    os.kill(server.record.pid, signal.SIGKILL)
    assert eventually(lambda: not background.registry.is_alive("demo"))
    status = status_of(background.registry.seen()[0])
    assert (status.state, status.since) == ("failed", None)
    assert status.reason == f"its process {server.record.pid} was killed"
    again = background.start("ready", tmp_path / "demo")
    assert (again.name, again.record.restarts) == ("demo", 0)


def test_a_recycled_process_id_is_not_the_server(background: Background, sleeper: "subprocess.Popen[bytes]") -> None:
    identity = identity_of(sleeper.pid)
    assert identity is not None
    recorded(background.registry, "demo", sleeper.pid, started=identity.started - 1)
    assert status_of(background.registry.seen()[0]).reason == f"its process {sleeper.pid} was killed"
    assert stopped(background.registry).outcome == "had ended"
    assert sleeper.poll() is None
    assert background.left() == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"boot": "another"}, "this machine was restarted while it ran"),
        ({"machine": "node7"}, "its process {pid} on node7 was killed, or node7 was restarted"),
    ],
)
def test_a_restarted_machine_is_said(background: Background, changes: dict[str, str], reason: str) -> None:
    recorded(background.registry, "demo", os.getpid(), **changes)
    assert status_of(background.registry.seen()[0]).reason == reason.format(pid=os.getpid())


def test_a_server_of_another_machine_is_shown_and_not_signalled(
    background: Background, sleeper: "subprocess.Popen[bytes]"
) -> None:
    recorded(background.registry, "demo", sleeper.pid, boot="another", machine="node7")
    lock = take_lock(background.registry.directory("demo") / "lock")
    try:
        status = status_of(background.registry.seen()[0])
        assert (status.state, status.elsewhere) == ("ready", "node7")
        with pytest.raises(ForgeError, match=f"demo is process {sleeper.pid} of node7, not of this machine") as refused:
            stopped(background.registry)
    finally:
        os.close(lock)
    assert refused.value.hint == "Run `trtforge stop demo` there."
    assert sleeper.poll() is None


@pytest.mark.parametrize("text", ["{", '{"pid": 1}', "[]"])
def test_a_damaged_record_is_said_and_removed_once_the_server_has_ended(background: Background, text: str) -> None:
    recorded(background.registry, "demo", os.getpid())
    (background.registry.directory("demo") / "record.json").write_text(text)
    lock = take_lock(background.registry.directory("demo") / "lock")
    try:
        assert status_of(background.registry.seen()[0]).state == "unknown"
        with pytest.raises(ForgeError, match="demo runs, but its record does not name its process: "):
            stopped(background.registry)
    finally:
        os.close(lock)
    assert stopped(background.registry).outcome == "had ended"
    assert background.left() == []


def test_a_process_id_that_is_a_group_is_never_read(background: Background) -> None:
    recorded(background.registry, "demo", os.getpid(), pid=-1)
    assert "pid" in background.registry.seen()[0].damage


def test_an_old_record_is_removed(background: Background) -> None:
    recorded(background.registry, "old", os.getpid(), state="failed", since=1_700_000_000, reason="x")
    recorded(background.registry, "new", os.getpid(), state="failed", reason="x")
    assert [server.name for server in background.registry.seen()] == ["new"]
    assert background.left() == ["new"]


def test_which_server_is_meant(background: Background) -> None:
    with pytest.raises(ForgeError, match="no server runs in the background"):
        chosen(background.registry, None)
    for name in ("demo", "demo-2"):
        recorded(background.registry, name, os.getpid())
    with pytest.raises(ForgeError, match="which server\\? There are demo, demo-2") as several:
        chosen(background.registry, None)
    assert several.value.hint == "Name one (`trtforge stop demo`), or stop them with `trtforge stop --all`."
    lock = take_lock(background.registry.directory("demo-2") / "lock")
    assert chosen(background.registry, None).name == "demo-2"  # the only one that runs
    os.close(lock)
    with pytest.raises(ForgeError, match="there is no server demo-3 in the background") as mistyped:
        chosen(background.registry, "demo-3")
    assert mistyped.value.hint == "Did you mean demo-2?"


def test_a_directory_of_another_user_is_refused(background: Background) -> None:
    recorded(background.registry, "demo", os.getpid())
    with patch("os.geteuid", lambda: 4_000_000), pytest.raises(ForgeError, match="belongs to another user"):
        background.registry.seen()


def test_the_machine_tells_when_it_was_started() -> None:
    assert len(boot_of_machine()) == len("7d1c4b7e-8d1c-4f0e-9a53-0a4c6fd0a5ce")
