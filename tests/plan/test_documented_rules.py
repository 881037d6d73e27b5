"""The table of rules in docs/planning.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def reported() -> Iterator[str]:
    """The rules that are named where a problem is made."""
    for path in (_ROOT / "trtforge").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "Problem"
                and node.args
            ):
                rule = node.args[0]
                if isinstance(rule, ast.Constant):
                    assert isinstance(rule.value, str)
                    yield rule.value


def test_every_rule_is_documented() -> None:
    rows = re.findall(r"^\| ((?:`\w+` ?)+)\|", (_ROOT / "docs/planning.md").read_text(), re.MULTILINE)
    documented = {rule for row in rows for rule in re.findall(r"\w+", row)}
    assert set(reported()) - documented == set()
