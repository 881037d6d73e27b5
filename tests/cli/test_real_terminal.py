"""A build on a real terminal: header, bars, and a screen that is clean at the end."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from tests.cli.screen import plain

ROOT = Path(__file__).parents[2]


def on_a_terminal(*words: str | Path) -> tuple[int, str]:
    """Run `trtforge WORDS` with stdout and stderr on a terminal of 80 columns: the exit status and what it got."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    command = [sys.executable, "-m", "trtforge", *map(str, words)]
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
