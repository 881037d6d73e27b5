"""A build on a real terminal: header, bars, and a screen that is clean at the end."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.screen import plain
from tests.cli.test_interruption import LOADING

ROOT = Path(__file__).parents[2]


def on_a_terminal(*words: str | Path, program: Sequence[str] = ("-m", "trtforge")) -> tuple[int, str]:
    """Run `trtforge WORDS` with stdout and stderr on a terminal of 80 columns: the exit status and what it got.

    `program`: words for Python that run it.
    """
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    command = [sys.executable, *program, *map(str, words)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT)
    os.close(theirs)
    found = b""
    while True:
        try:
            more = os.read(ours, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not more:
            break
        found += more
    os.close(ours)
    return process.wait(), found.decode()


def test_a_build_shows_header_and_bars_and_leaves_the_table(tmp_path: Path) -> None:
    status, raw = on_a_terminal("build", "demo-fp32", "--out", tmp_path / "out", "--to", "convert")
    assert status == 0
    text = plain(raw).replace("\r\n", "\n")
    assert text.startswith("Build demo-fp32\n  model     recipes/demo-model, llama, 4.07 M parameters, 8.14 MB\n")
    assert re.search(r"\rchecking ━+ 0:\d\d", text)
    assert re.search(r"\rconvert ━+ 0:\d\d", text)
    assert re.search(r"\rConverting ━+ +\d+%  .* of 16\.3 MB", text)
    assert raw.count("\x1b[?25l") == raw.count("\x1b[?25h") > 0  # the cursor is shown again
    frames = re.split(r"[\r\n]", text)
    assert [frame for frame in frames if len(frame) > 80 and str(tmp_path) not in frame] == []
    assert text.rstrip().splitlines()[-1].startswith("next: trtforge build demo-fp32 --out ")


def test_an_error_closes_the_bars_first(tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint" / "mine.txt").write_text("x")
    status, raw = on_a_terminal("build", "demo-fp32", "--out", tmp_path / "out", "--to", "convert")
    assert status == 1
    assert raw.rindex("\x1b[?25h") < raw.index("error:")
    assert "has files that trtforge did not write" in plain(raw).replace("\r\n", " ")


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_torch_loads_shows_the_cursor_again(tmp_path: Path, times: int) -> None:
    """A second one ends the process at once."""
    kill = "os.kill(os.getpid(), signal.SIGINT)"
    program = LOADING.replace(kill, f"[{kill} for _ in range({times})]")
    out = tmp_path / "out"
    words = ["build", "demo-fp32", "--out", out, "--to", "convert"]
    status, raw = on_a_terminal("torch", *words, program=("-c", program))
    assert status == 130
    assert raw.count("\x1b[?25l") > 0
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")
    said = plain(raw).replace("\r\n", "\n")
    assert said.count("interrupted by SIGINT: trtforge build") == 1
    last = said.rstrip("\n").rpartition("\n")[2]
    assert last == f"hint: run again: trtforge build demo-fp32 --out {out} --to convert"
