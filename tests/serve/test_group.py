"""Programs of a server that end when they are asked to, and those that do not."""

import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE, eventually
from trtforge.serve.group import Group

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
POLITE = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); print(flush=True); signal.pause()"


@pytest.mark.parametrize(("programs", "left"), [({"one": POLITE, "other": POLITE}, []), ({"one": DEAF}, ["one"])])
def test_programs_that_do_not_end_are_named(tmp_path: Path, programs: dict[str, str], left: list[str]) -> None:
    log = tmp_path / "log"
    group = Group(log)
    for name, code in programs.items():
        group.start(name, [sys.executable, "-c", code], {})
    assert eventually(lambda: log.read_text() == "\n" * len(programs))
    try:
        assert group.terminate(0.5 if left else PATIENCE) == left
    finally:
        group.end()
