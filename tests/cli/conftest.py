"""The program in the process of the tests, where its start would take longer than what is tested."""

import sys
from pathlib import Path
from typing import Any

import pytest

from trtforge.cli.app import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`trtforge WORDS`, in this process: the exit status, stdout and stderr."""

    def trtforge(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trtforge", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return trtforge
