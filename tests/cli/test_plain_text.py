"""What users named (files, values of recipes, messages) is printed as it is: never as emoji or markup."""

import ast
import re
from pathlib import Path

import pytest

import trtforge
from trtforge.cli import show
from trtforge.cli.app import show_error
from trtforge.core.errors import ForgeError

SOURCES = sorted(Path(trtforge.__file__).parent.rglob("*.py"))
NAMES = "l.jsonl:100: [red]x[/red] [/y] :smile:"


def test_errors_and_hints_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(ForgeError(NAMES, hint=f"not {NAMES}"))
    assert capsys.readouterr().err == f"error: {NAMES}\nhint: not {NAMES}\n"


def test_tables_are_plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show.table(f"title {NAMES}", [f"column {NAMES}", "b"], [[NAMES, f"value {NAMES}"]])
    printed = capsys.readouterr().out
    for said in (f"title {NAMES}", f"column {NAMES}", f" {NAMES} ", f"value {NAMES}"):
        assert said in printed


def test_rich_gets_no_strings() -> None:
    """A string given to rich is parsed for markup and emoji: `Text` is not."""
    printed = re.compile(r"^(?!print$)(?:.*\.)?(?:print|add_row|add_column)$")
    for path in SOURCES:
        text = path.read_text()
        if "rich" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and printed.match(ast.unparse(node.func)):
                strings = [arg for arg in node.args if isinstance(arg, ast.JoinedStr | ast.Constant | ast.Starred)]
                allowed = [arg for arg in strings if ast.unparse(arg).startswith("*map(Text")]
                assert strings == allowed, f"{path.name}:{node.lineno}: {ast.unparse(node)}"
