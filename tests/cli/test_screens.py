"""What the program shows on terminals of 80 and 120 columns.

Rule: no line is wider than the terminal and no word is broken. Wider may only be a line that is one word that has no
place to break (a path, a name) or one command in backquotes, each perhaps after a label such as `hint:`, and a line
`next:` with a command to paste.
"""

import re
import subprocess
import sys

import pytest

from tests.cli.screen import SCREENS, WIDTHS, kept, screen, table
from tests.docs_cli import command_names
from trtforge.cli import show

_UNBREAKABLE = re.compile(r"\s*(?:(?:error|hint|warning|note|next):\s+)?(?:[^\s`]*`[^`]+`\S*|\S+)\s*")
_COMMANDS = ((), ("recipes",), ("cache",), *(tuple(name.split()) for name in command_names()))
_SEEN = (
    ("plan", "llama-3.1-8b-fp8"),
    ("plan", "llama-3.1-405b-fp8"),
    ("plan", "demo-int4awq"),
    ("plan", "meta-llama/Llama-3.1-70B", "--gpu", "h100-80gb", "--tp", "3", "--quant", "fp8"),
    ("plan", "meta-llama/Llama-3.1-70B", "--gpu", "h200", "--alternatives", "--goal", "latency"),
    ("plan", "meta-llama/Llama-3.1-70B", "--alternatives"),
    ("inspect", "recipes/demo-model"),
    ("inspect", "recipes/demo-model", "--tensors"),
    ("inspect", "recipes/demo-model/of-a-name-that-does-not-exist-anywhere-in-this-repository/and-is-long"),
    ("recipes", "list"),
    ("version",),
    ("cache", "list"),
    ("build", "demo-int4awq", "--dry-run"),
    ("build", "llama-3.1-405b-fp8", "--dry-run"),
    ("build", "mixtral-8x7b-fp8", "--dry-run"),
    ("build", "demo-int4"),
    ("build", "demo-fp32", "--set", "engine.max_bach_size=3"),
    ("build", "llama-3.1-8b-fp8", "--set", "parallel.tp=3", "--dry-run"),
    ("build", "llama-3.1-8b-fp8", "--set", "engine.target.gpu=l4", "--dry-run"),
    ("convert", "recipes/demo-model", "out", "--embedding-sharding-dim", "1"),
    ("compare", "recipes", "recipes/demo-model"),
    ("build", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "h100-80gb", "--quant", "fp8", "--dry-run"),
    ("serve", "recipes"),
    ("infer", "hello", "--url", "127.0.0.1:9"),
    ("verify", "recipes", "--against", "recipes/demo-model"),
    ("nonsense",),
)


def too_wide(text: str, width: int) -> list[str]:
    """The lines that break the rule."""
    lines = [line for line in text.splitlines() if len(line) > width]
    return [line for line in lines if not _UNBREAKABLE.fullmatch(line) and not line.startswith("next: ")]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SCREENS)
def test_screens_are_as_they_were(name: str, width: int) -> None:
    """After a change that is meant: python -m tests.cli.screen"""
    assert SCREENS[name](width) == kept(name, width).read_text()


@pytest.mark.parametrize("words", [*((*words, "--help") for words in _COMMANDS), *_SEEN], ids=" ".join)
def test_no_line_is_too_wide_and_no_word_is_broken(words: tuple[str, ...]) -> None:
    narrow = screen(80, *words)
    assert narrow.strip()
    assert too_wide(narrow, 80) == []
    if words[-1] != "--help":
        assert set(tokens(narrow)) <= set(tokens(screen(400, *words)))


def tokens(text: str) -> list[str]:
    """Words, without the lines of tables and what is cut on purpose."""
    return [word for word in re.sub(r"[─━│┃┏┓┗┛┡┩┳╇┴┬┼└┘├┤╷╵╶╴]", " ", text).split() if "…" not in word]


@pytest.mark.parametrize("passed", [True, False])
def test_the_table_of_a_build_fits(passed: bool) -> None:
    for width in WIDTHS:
        assert too_wide(table(width, passed=passed), width) == []


def test_a_dry_run_is_one_screen() -> None:
    for recipe in ("demo-int4awq", "demo-tp2", "llama-3.1-405b-fp8", "gemma-2-9b-fp8"):
        assert len(screen(80, "build", recipe, "--dry-run").splitlines()) <= 24


def test_outside_a_terminal_a_message_is_one_line() -> None:
    words = ["plan", "meta-llama/Llama-3.1-70B", "--gpu", "h100-80gb", "--tp", "3", "--quant", "fp8"]
    done = subprocess.run([sys.executable, "-m", "trtforge", *words], capture_output=True, text=True, check=False)
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")


def test_commands_in_backquotes_and_words_stay_whole() -> None:
    command = "`trtforge calibrate /a/model out --quant fp8 --samples 4`"
    text = show.wrapped(f"hint: First run {command}, then the build of the recipe again.", 40)
    assert text.splitlines() == ["hint: First run", f"{command},", "then the build of the recipe again."]
    assert show.wrapped("a\n  bb bb", 4) == "a\n  bb\n  bb"
    assert show.wrapped("x" * 50, 40) == "x" * 50


def test_paths_are_cut_in_the_middle() -> None:
    assert show.shortened("build/llama-3.1-8b/repository", 20) == "build/…8b/repository"
    assert show.shortened("short", 20) == "short"
