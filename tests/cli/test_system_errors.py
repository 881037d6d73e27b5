"""What the program says of file systems, streams and memory that fail it."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EACCES, "Choose another place, or run as a user who may read and write there."),
        (errno.ENAMETOOLONG, "Choose a shorter name."),
        (errno.ENOSPC, "Free space, then run again."),
        (errno.EIO, "Check the disk or network share that it is on."),
        (errno.EBUSY, "Add --verbose for the traceback."),
    ],
)
def test_an_error_of_the_file_system_has_a_remedy(
    run: Any, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), "/x")

    monkeypatch.setattr("trtforge.cli.recipes.shipped", fail)
    status, _, errors = run("recipes", "list")
    assert (status, errors) == (1, f"error: /x: {os.strerror(number)}\nhint: {hint}\n")


@pytest.mark.parametrize("words", [("--version",), ("recipes", "list"), ("plan", "demo-int4awq", "--json")])
def test_output_that_cannot_be_written_is_said_where_python_buffers_it(words: tuple[str, ...]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "trtforge", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment, timeout=PATIENCE
        )
    assert done.returncode == 1
    assert done.stderr == f"error: {os.strerror(errno.ENOSPC)}\nhint: Free space, then run again.\n"


def test_a_limit_of_threads_is_said(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("trtforge.cli.recipes.shipped", fail)
    status, _, errors = run("recipes", "list")
    assert (status, errors.splitlines()[0]) == (1, "error: no more threads can be started")


def test_a_link_to_itself_is_said(run: Any, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    status, _, errors = run("convert", DEMO_MODEL, tmp_path / "loop")
    assert status == 1
    assert errors == (
        f"error: {tmp_path}/loop: {os.strerror(errno.ELOOP)}\n"
        "hint: Remove the symbolic link that leads to itself, or give another path.\n"
    )


def test_a_deleted_current_directory_is_said(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    status, out, errors = run("build", DEMO_MODEL)
    assert (status, out) == (1, "")
    assert errors == (
        "error: the current directory: No such file or directory\nhint: Change to a directory that exists.\n"
    )


def test_closed_streams_are_those_of_nobody(tmp_path: Path) -> None:
    """As a service manager starts programs; a file opened later would get their numbers."""
    command = 'exec "$0" -m trtforge recipes copy demo-fp32 "$1" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable, str(tmp_path / "mine.yaml")], timeout=PATIENCE)
    assert done.returncode == 0
    assert "name: mine\n" in (tmp_path / "mine.yaml").read_text()


def test_too_little_memory_is_said(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr("trtforge.cli.recipes.shipped", fail)
    status, out, errors = run("recipes", "list", "--json")
    assert (status, json.loads(out)["error"]) == (1, "there is not enough memory")
    assert errors.startswith("error: there is not enough memory\nhint: Give it more")


def test_the_message_of_too_little_memory_may_itself_have_too_little(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("trtforge.cli.recipes.shipped", fail)
    monkeypatch.setattr("trtforge.cli.app.options_of", fail)
    status, _, errors = run("recipes", "list")
    assert (status, errors) == (
        1,
        "error: there is not enough memory\n"
        "hint: Give it more (the limit of the container or of `ulimit -v`), or work on a smaller part.\n",
    )


def test_an_option_that_is_not_utf8_is_said(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode() -> None:
        ("Be brief, " * 5 + "caf\udce9" + " and polite" * 5).encode()

    monkeypatch.setattr("trtforge.cli.recipes.shipped", encode)
    status, _, errors = run("recipes", "list")
    assert status == 1
    assert (
        errors == "error: 'brief, Be brief, caf\\udce9 and polite and poli' is not UTF-8 text\nhint: Give UTF-8 text.\n"
    )
