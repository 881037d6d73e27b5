"""Checks EBNF grammars: refuses what xgrammar would ignore or take too long to compile or follow."""

import re
from collections.abc import Mapping

from trtforge.runtime.guidance.patterns import DEEPEST
from trtforge.runtime.guidance.repetitions import most_repeated
from trtforge.runtime.guidance.unenforced import Unenforced

_MOST_RULES = 1000
_PART = re.compile(
    r"""\#[^\n]*
    |(?P<text>"(?:\\.|[^"\\\n])*(?:"|(?P<open_text>\\?(?:\n|\Z)))|\[(?:\\.|[^\]\\\n])*(?:\]|(?P<open_class>\\?(?:\n|\Z))))
    |(?P<rule>[A-Za-z_][\w.-]*)(?P<defined>\s*::=)?
    |\{\s*(?P<least>\d+)\s*(?:,\s*(?P<most>\d*)\s*)?\}
    |(?P<lookahead>\(=)
    |(?P<bracket>[()])""",
    re.DOTALL | re.VERBOSE,
)
_Part = tuple[str, int | str]
"""Kind and value: a bracket with 0, "repeat" with its maximum count, "text" or "rule" with its text."""


def check_grammar(grammar: str) -> None:
    """Raises Unenforced for lookahead, too many rules or brackets, and nested repetitions with large counts."""
    rules: dict[str, list[_Part]] = {}
    parts: list[_Part] = []
    depth = 0
    for found in _PART.finditer(grammar):
        if found["lookahead"]:
            raise Unenforced("lookahead in a grammar is not supported")
        if found["open_text"] is not None or found["open_class"] is not None:
            raise Unenforced(f"the text or class {found[0][:40]!r} of a grammar is not closed")
        if found["rule"] == "Regex":
            raise Unenforced("Regex in a grammar is not supported: write it as rules")
        if found["defined"]:
            parts = rules.setdefault(found["rule"], [])
        elif found["bracket"]:
            parts.append((found[0], 0))
            depth += 1 if found[0] == "(" else -1
        elif found["least"]:
            parts.append(("repeat", min(int((found["most"] or found["least"])[:9]), 10**9)))
        elif found["text"] or found["rule"]:
            parts.append(("rule" if found["rule"] else "text", found[0]))
        if depth > DEEPEST:
            raise Unenforced(f"it has more than {DEEPEST} nested brackets")
    if len(rules) > _MOST_RULES:
        raise Unenforced(f"it has {len(rules)} rules, at most {_MOST_RULES} are supported")
    times: dict[str, int] = {}
    for name in rules:
        _times(name, rules, times, 0)


def _times(name: str, rules: Mapping[str, list[_Part]], known: dict[str, int], depth: int) -> int:
    """Maximum repetitions of anything in a rule; 1 for rules being processed (recursion) or nested too deeply."""
    if name in known or name not in rules or depth > DEEPEST:
        return known.get(name, 1)
    known[name] = 1
    known[name] = most_repeated(
        (kind, value if isinstance(value, int) else _times(value, rules, known, depth + 1) if kind == "rule" else 1)
        for kind, value in rules[name]
    )
    return known[name]
