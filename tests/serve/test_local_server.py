"""A server that does not start says why, in all lines of its error."""

import sys
from pathlib import Path

import pytest

from trtforge.core.errors import ForgeError
from trtforge.serve.local_server import local_server

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
    assert caught.value.message == "the server was killed, as the system does where memory runs out"
    assert caught.value.hint.startswith("Give it more memory (the limit of the container)")
