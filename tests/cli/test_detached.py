"""`trtforge status` and `stop` as a user types them, on records of servers that are not there."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.screen import screen
from tests.cli.test_screens import too_wide
from tests.serve.detached.conftest import recorded
from trtforge.cli import completion
from trtforge.core.locks import take_lock
from trtforge.serve.detached.registry import Registry

SINCE = 4_000_000_000
_NONE = "no server runs in the background: `trtforge serve REPO --detach` starts one\n"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A state directory of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("TZ", "UTC")
    return Registry.of_user()


@pytest.fixture
def served(registry: Registry) -> Iterator[Registry]:
    """A server that is ready, in this process, and one that has failed."""
    recorded(registry, "demo", os.getpid(), since=SINCE, restarts=2, openai="http://127.0.0.1:4/v1")
    failure = {"state": "failed", "since": SINCE, "reason": "rank 0 ended:\nout of memory", "hint": "Lower it."}
    recorded(registry, "other", os.getpid(), exit_status=1, **failure)
    lock = take_lock(registry.directory("demo") / "lock")
    yield registry
    os.close(lock)


def test_where_there_is_no_server(registry: Registry, run: Any) -> None:
    assert run("status") == (0, _NONE, "")
    assert json.loads(run("status", "--json")[1]) == {"servers": []}
    assert run("stop", "--all") == (0, _NONE, "")
    assert run("stop")[2] == (
        "error: no server runs in the background\nhint: `trtforge serve REPO --detach` starts one.\n"
    )
    assert not registry.root.exists()


def test_a_line_for_each_server_and_what_is_wrong(served: Registry, run: Any) -> None:
    assert run("status")[1].splitlines() == [
        "name   state              since                pid".ljust(len(f"{os.getpid()}") + 47)
        + "  repository and addresses",
        f"demo   ready, 2 restarts  2096-10-02 07:06:40  {os.getpid()}  /models/demo http=127.0.0.1:1 grpc=127.0.0.1:2 "
        "metrics=127.0.0.1:3 openai=http://127.0.0.1:4/v1",
        f"other  failed             2096-10-02 07:06:40  -{' ' * len(str(os.getpid()))} /models/demo",
        "other: rank 0 ended:",
        "out of memory",
        "hint: Lower it.",
        f"log: {served.log('other')}",
    ]


def test_the_exit_status_is_that_of_the_named_server(served: Registry, run: Any) -> None:
    assert run("status")[0] == 0
    assert run("status", "demo")[0] == 0
    assert run("status", "other")[0] == 1
    assert run("status", "dem")[2].splitlines()[1] == "hint: Did you mean demo? Run `trtforge status demo`."


def test_all_that_is_known_comes_as_json(served: Registry, run: Any) -> None:
    demo, other = json.loads(run("status", "--json")[1])["servers"]
    assert demo == {
        "name": "demo",
        "state": "ready",
        "since": "2096-10-02T07:06:40Z",
        "running": True,
        "reason": None,
        "hint": None,
        "log": str(served.log("demo")),
        "repository": "/models/demo",
        "http": "127.0.0.1:1",
        "grpc": "127.0.0.1:2",
        "metrics": "127.0.0.1:3",
        "openai": "http://127.0.0.1:4/v1",
        "machine": os.uname().nodename,
        "pid": os.getpid(),
        "started": "2023-11-14T22:13:20Z",
        "restarts": 2,
        "exit_status": None,
    }
    assert (other["state"], other["running"], other["exit_status"]) == ("failed", False, 1)
    assert other["reason"] == "rank 0 ended:\nout of memory"


def test_the_table_fits_a_terminal(served: Registry) -> None:
    shown = screen(80, "status")
    assert "│ demo  │ ready      │ 2096-10-02 │ /models/demo                 " in shown
    assert [line for line in too_wide(shown, 80) if not line.startswith("log: ")] == []


def test_stopping_what_had_ended_removes_it(served: Registry, run: Any) -> None:
    assert run("stop", "other") == (
        0,
        "other had ended: rank 0 ended:\nout of memory\nits record and its log are removed\n",
        "",
    )
    assert completion.servers("") == ["demo"]
    recorded(served, "third", os.getpid(), state="stopped", since=SINCE, reason="stopped", exit_status=0)
    stopped = {"name": "third", "outcome": "had ended", "reason": "stopped", "exit_status": None}
    assert json.loads(run("stop", "third", "--json")[1]) == {"servers": [stopped]}


def test_all_leaves_out_what_runs_elsewhere(registry: Registry, run: Any) -> None:
    recorded(registry, "demo", os.getpid(), boot="another", machine="node7")
    recorded(registry, "other", os.getpid())
    lock = take_lock(registry.directory("demo") / "lock")
    status, said, warned = run("stop", "--all")
    os.close(lock)
    assert (status, said.splitlines()[0]) == (1, f"other had ended: its process {os.getpid()} was killed")
    assert warned == f"warning: demo is process {os.getpid()} of node7, not of this machine or container\n"


def test_a_name_and_all_exclude_each_other(run: Any) -> None:
    assert run("stop", "demo", "--all")[0] == 2


def test_names_are_completed(served: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completion.servers("") == ["demo", "other"]
    assert completion.servers("d") == ["demo"]
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", _no_home)
    assert completion.servers("") == []


def test_a_user_without_a_home_is_told(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", _no_home)
    assert run("status")[2] == (
        "error: this user has no home directory, where the state of servers is kept\n"
        "hint: Set XDG_STATE_HOME to a directory for it.\n"
    )


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")
