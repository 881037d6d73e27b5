"""Directories whose names begin with a hyphen: the commands that are printed take them as paths."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL


def words(line: str) -> list[str]:
    """The arguments of the command that a printed line ends with."""
    return shlex.split(line.partition("trtforge ")[2])


@pytest.mark.parametrize(
    ("make", "following"),
    [
        (("convert", DEMO_MODEL, "./-a"), "verify"),
        (("init", DEMO_MODEL, "--", "-r.yaml"), "build"),
        (("build", DEMO_MODEL, "--quant", "none", "--out", "./-b", "--to", "convert"), "build"),
    ],
)
def test_the_next_command_can_be_run(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: tuple[object, ...], following: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(*make)
    assert status == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("next: ") or "; next: " in line]
    command, *arguments = words(line)
    assert command == following
    assert not any(argument.startswith("-") and not argument.startswith("--") for argument in arguments[:1])
    ending = ("--help",) if following != "build" else ("--dry-run",)
    status, _, err = run(command, *arguments, *ending)
    assert status == 0, err


def test_a_model_in_such_a_directory_is_named(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-model").symlink_to(DEMO_MODEL)
    status, out, err = run("build", "./-model", "--quant", "none", "--out", "b", "--to", "convert")
    assert status == 0, err
    assert "next: trtforge build ./-model --quant none --out b --from verify" in out.replace("\n  ", " ")
