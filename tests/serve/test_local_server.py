"""A server that does not start says why, in all lines of its error."""

import sys
from pathlib import Path

import pytest

from trtforge.core.errors import ForgeError
from trtforge.serve import local_server as local_server_module
from trtforge.serve.local_server import local_server
from trtforge.serve.request import Unavailable, unreachable

ENDED = "error: the Triton server ended while starting with status 1:\nERROR: Unable to initialize shared memory"


@pytest.mark.parametrize(
    ("log", "message", "hint"),
    [
        (f"warning: x\n{ENDED}\nhint: Start with --shm-size=2g.\n", ENDED[7:], "Start with --shm-size=2g."),
        (f"{ENDED}\nhint: See the whole log with --verbose.\n", ENDED[7:], "Run `trtforge serve {} --verbose` to see"),
        ("one\n\ntwo\n", "the server did not start:\none\ntwo", "Run `trtforge serve {} --verbose` to see"),
    ],
)
def test_why_a_server_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, message: str, hint: str
) -> None:
    (tmp_path / "log").write_text(log)
    (tmp_path / "python").write_text(f"#!/bin/sh\ncat {tmp_path}/log >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ForgeError) as caught, local_server(tmp_path, ready_timeout=5):
        pass
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint.format(tmp_path))


def test_a_server_that_was_killed_is_said_to_have_had_too_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho warning: x >&2\nkill -9 $$\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ForgeError) as caught, local_server(tmp_path, ready_timeout=5):
        pass
    assert caught.value.message == "the server was killed, probably because memory ran out"
    assert caught.value.hint.startswith("Give it more memory (the limit of the container)")


KILLED = "error: the engine process (process 5) ended:\nthe engine process was killed"
GONE = Unavailable("the server refused the request: UNAVAILABLE: the engine process ended", hint="Send it again later.")


@pytest.mark.parametrize("seen", [GONE, unreachable("127.0.0.1:1")])
@pytest.mark.parametrize(
    ("end", "message", "hint"),
    [
        (f"printf '{KILLED}\\nhint: Give it more memory.\\n' >&2; exit 1", KILLED[7:], "Give it more memory."),
        (f"printf '{KILLED}\\n' >&2; exit 1", KILLED[7:], "Run it again."),
        ("kill -9 $$", "the server was killed, probably because memory ran out", "Give it more memory"),
        ("exit 1", "the server ended with status 1", "Run it again."),
        ("exec sleep 60", None, None),
    ],
)
def test_a_server_that_ends_meanwhile_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, message: str | None, hint: str | None, seen: ForgeError
) -> None:
    """Clients only see that their requests were not answered. Where it goes on, that is said."""
    monkeypatch.setattr(local_server_module, "_END_SECONDS", 0.3 if "sleep" in end else 10.0)
    (tmp_path / "python").write_text(f"#!/bin/sh\necho ready x\n{end}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ForgeError) as caught, local_server(tmp_path, ready_timeout=5):
        raise seen
    assert caught.value.message == (message or seen.message)
    assert caught.value.hint.startswith(hint or seen.hint)
