"""The program on a terminal of a given width, in the process of the tests, and the screens that are kept.

`python -m tests.cli.screen` writes the kept screens again; look at the difference before committing it.
"""

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

from tests.pipeline.records import full, quality
from trtforge.cli.app import main
from trtforge.cli.build_view import show_report

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).parent / "screens"
WIDTHS = (80, 120)
_ENVIRONMENT = {"TERM": "dumb", "NO_COLOR": "1"}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    """Text that takes itself for a terminal."""

    def isatty(self) -> bool:
        """Always."""
        return True


@contextmanager
def terminal(width: int) -> Iterator[tuple[Terminal, Terminal]]:
    """stdout and stderr as terminals of this width, in the repository's root."""
    out, err = Terminal(), Terminal()
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        with (
            patch.dict(os.environ, {**_ENVIRONMENT, "COLUMNS": str(width)}),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            yield out, err
    finally:
        os.chdir(before)


def plain(text: str) -> str:
    """Text without escape sequences."""
    return _ESCAPES.sub("", text)


def screen(width: int, *words: str) -> str:
    """What `trtforge WORDS` shows on a terminal of this width: stdout, then stderr."""
    program = patch.object(sys.modules["__main__"], "__package__", None)  # else usage lines name the tests' program
    argv = patch.object(sys, "argv", ["trtforge", *words])
    with terminal(width) as (out, err), program, argv, suppress(SystemExit):
        main()
    return plain(out.getvalue() + err.getvalue())


def table(width: int, *, passed: bool) -> str:
    """The table at the end of a build."""
    with terminal(width) as (out, _):
        show_report(full(verification=quality(passed=passed)))
    return out.getvalue()


SCREENS: dict[str, Callable[[int], str]] = {
    "help": lambda width: screen(width, "--help"),
    "help-compare": lambda width: screen(width, "compare", "--help"),
    "table": lambda width: table(width, passed=True),
    "table-failed": lambda width: table(width, passed=False),
    "dry-run": lambda width: screen(width, "build", "llama-3.1-8b-fp8", "--dry-run"),
    "plan": lambda width: screen(width, "plan", "llama-3.1-8b-fp8"),
    "inspect": lambda width: screen(width, "inspect", "recipes/demo-model"),
    "error": lambda width: screen(
        width, "plan", "meta-llama/Llama-3.1-70B", "--gpu", "a100-80gb", "--tp", "3", "--quant", "fp8"
    ),
    "error-usage": lambda width: screen(width, "build", "demo-fp32", "--from", "package", "--to", "convert"),
}


def kept(name: str, width: int) -> Path:
    """The file of a screen."""
    return KEPT / f"{name}-{width}.txt"


if __name__ == "__main__":
    KEPT.mkdir(exist_ok=True)
    for screen_name, draw in SCREENS.items():
        for columns in WIDTHS:
            kept(screen_name, columns).write_text(draw(columns))
