"""What `trtforge doctor --log` knows, as tables of docs/troubleshooting.md."""

import re
from collections.abc import Iterable
from typing import Any

from trtforge.doctor.known import build, containers, engine, environment, llmapi, precision, quantize, ranks, serving
from trtforge.doctor.pattern import Pattern

try:
    from re._parser import parse
except ImportError:  # Python 3.10
    from sre_parse import parse

SUBJECTS: dict[str, tuple[Pattern, ...]] = {
    "build": build.PATTERNS,
    "quantize": quantize.PATTERNS,
    "precision": precision.PATTERNS,
    "engine": engine.PATTERNS,
    "ranks": ranks.PATTERNS,
    "serving": serving.PATTERNS,
    "llmapi": llmapi.PATTERNS,
    "environment": environment.PATTERNS,
    "containers": containers.PATTERNS,
}
"""By module of trtforge/doctor/known."""

_GAP = "\N{HORIZONTAL ELLIPSIS}"
_NOT_THE_CAUSE = {"effect": " (follows from an earlier error)", "warning": " (a warning)", "harmless": " (harmless)"}


def log_messages(subject: str) -> str:
    """The messages of one subject: what the log says, what it means, what to do."""
    rows = ["| the log says | cause | what to do |", "|---|---|---|"]
    for pattern in SUBJECTS[subject]:
        cells = (
            f"`{_skeleton(pattern.regex)}`{_NOT_THE_CAUSE.get(pattern.kind, '')}",
            _without_values(pattern.means),
            _without_values(pattern.do),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _skeleton(regex: str) -> str:
    """A message as its pattern has it, an ellipsis for what differs from log to log."""
    text = re.sub(r"\s+", " ", "".join(_literals(parse(regex))))
    return re.sub(rf"(?:{_GAP} ?)*{_GAP}", _GAP, text).strip().removeprefix(_GAP)


def _literals(parsed: Iterable[Any]) -> Iterable[str]:
    """The text that a parsed expression asks for: of alternatives the first, of what may be left out nothing."""
    for operation, value in parsed:
        match str(operation):
            case "LITERAL":
                yield chr(value)
            case "SUBPATTERN" | "ASSERT":
                yield from _literals(value[-1])
            case "BRANCH":
                yield from _literals(value[1][0])
            case "IN" if str(value[0][0]) == "LITERAL":
                yield chr(value[0][1])
            case "AT" | "ASSERT_NOT":
                continue
            case "MAX_REPEAT" | "MIN_REPEAT" if value[:2] == (0, 1):
                continue
            case "MAX_REPEAT" | "MIN_REPEAT" if "SPACE" in str(value[2]):
                yield " "
            case _:
                yield _GAP


def _without_values(template: str) -> str:
    """An explanation with an ellipsis where the log's values stand."""
    return re.sub(r"\{\w+\}", _GAP, template.replace("{{", "{").replace("}}", "}"))
