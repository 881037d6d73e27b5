"""Translates structural tags so that xgrammar enforces all of their schemas and expressions."""

from typing import Any

from trtforge.runtime.guidance.ebnf import check_grammar
from trtforge.runtime.guidance.patterns import expression
from trtforge.runtime.guidance.repetitions import most_repeated
from trtforge.runtime.guidance.schemas import enforceable

_FREE = ("any_text", "any_tokens")


def enforceable_tag(tag: Any) -> Any:
    """The structural tag for xgrammar. Raises Unenforced."""
    made, _ = _part(tag)
    return made


def _part(part: Any) -> tuple[Any, int]:
    """A translated part of a tag, and the maximum repetitions in it."""
    if isinstance(part, list):
        made = [_part(each) for each in part]
        return [each for each, _ in made], max((times for _, times in made), default=1)
    if not isinstance(part, dict):
        return part, 1
    kind = part.get("type")
    found = {key: (each, 1) if key == "json_schema" else _part(each) for key, each in part.items()}
    values = {key: each for key, (each, _) in found.items()}
    times = max((each for _, each in found.values()), default=1)
    if "json_schema" in values:
        values["json_schema"] = enforceable(values["json_schema"], controls=True)
    if kind == "regex" and isinstance(values.get("pattern"), str):
        values["pattern"] = expression(values["pattern"])
        times = 2
    if kind == "grammar" and isinstance(values.get("grammar"), str):
        check_grammar(values["grammar"])
    if kind in _FREE:
        times = 2
    most = values.get("max")
    if kind == "repeat" and isinstance(most, int):
        times = most_repeated((("part", times), ("repeat", max(most, 1))))
    return values, times
