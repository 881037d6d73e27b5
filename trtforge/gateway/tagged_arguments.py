"""Arguments of a call that stand between tags, as JSON: each has the type that the schema of its function says."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json
from trtforge.core.stop_text import overlap

_LONGEST_HEAD = 400
_ANY = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_TEXT = frozenset({"string"})
_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class ParameterTags:
    """`head`: all up to a value, and `mark`: how its tag begins; `end`: what follows the value.

    `lines`: the value has lines of its own; the line breaks around it do not belong to it.
    """

    head: re.Pattern[str]
    mark: str
    end: str
    lines: bool = False


class TaggedArguments:
    """Follows the arguments of one call. `schema`: of the object of all arguments. `closed`: they are complete."""

    def __init__(self, tags: ParameterTags, schema: Mapping[str, object]) -> None:
        self._tags = tags
        properties = schema.get("properties")
        self._schemas: Mapping[str, object] = properties if isinstance(properties, dict) else {}
        self._types: frozenset[str] | None = None  # of the value that has begun
        self._made = ""
        self._count = 0
        self.closed = False

    def of(self, text: str, reason: str | None) -> tuple[int, str]:
        """How many characters of the following text were read, and their JSON.

        `reason`: the finish reason with the last text, else None.
        """
        at, self._made, goes_on = 0, "", True
        while goes_on:
            read = self._between if self._types is None else self._value
            size, goes_on = read(text[at:], reason)
            at += size
        return at, self._made

    def _between(self, text: str, reason: str | None) -> tuple[int, bool]:
        """Up to the next value; anything else than the tag of a parameter ends the arguments."""
        if head := self._tags.head.match(text):
            name = head["name"].strip()
            self._types = _types(self._schemas.get(name))
            self._made += f"{self._separator()}{json.dumps(name, ensure_ascii=False)}: "
            self._made += '"' if self._types == _TEXT else ""
            return head.end(), True
        ahead = text.lstrip()
        may_be = len(text) <= _LONGEST_HEAD and (self._tags.mark.startswith(ahead) or ahead.startswith(self._tags.mark))
        if may_be and reason in (None, "length"):
            return 0, False
        self._made += "}" if self._count else "{}"
        self.closed = True
        return len(text) - len(ahead), False

    def _separator(self) -> str:
        self._count += 1
        return "{" if self._count == 1 else ", "

    def _value(self, text: str, reason: str | None) -> tuple[int, bool]:
        """More of a value: all of it, or what is there of a string. A value may end with the answer."""
        end = text.find(self._tags.end)
        if end < 0 and reason in (None, "length"):
            held = max(overlap(text, mark) for mark in self._ends()) if reason is None else 0
            size = len(text) - held if self._types == _TEXT else 0
            self._made += _escaped(text[:size])
            return size, False
        value = text[:end] if end >= 0 else text
        value = value.removesuffix("\n") if self._tags.lines else value
        self._made += f'{_escaped(value)}"' if self._types == _TEXT else _as_json(value, self._types or _ANY)
        self._types = None
        return end + len(self._tags.end) if end >= 0 else len(text), True

    def _ends(self) -> tuple[str, ...]:
        return (self._tags.end, f"\n{self._tags.end}") if self._tags.lines else (self._tags.end,)


def _types(schema: object) -> frozenset[str]:
    """JSON types of a schema's values; all where it does not say."""
    if not isinstance(schema, dict):
        return _ANY
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(map(_type, values))
    for kind in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(kind), list):
            return frozenset().union(*map(_types, several))
    given = schema.get("type")
    return frozenset(each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)) or _ANY


def _type(value: object) -> str:
    match value:
        case str():
            return "string"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case None:
            return "null"
    return "array" if isinstance(value, list) else "object"


def _as_json(text: str, types: frozenset[str]) -> str:
    """A value of one of the types: as the JSON that the text is (or what Python writes for it), else a string."""
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    try:
        value = parse_json(bare, "the argument", hint="", unique=False)
        json.dumps(value, allow_nan=False)
    except (ForgeError, ValueError):
        return json.dumps(text, ensure_ascii=False)
    found = _type(value)
    known = found in types or (found == "integer" and "number" in types)
    if "string" in types and types != _ANY and (not known or found == "string"):
        return json.dumps(text, ensure_ascii=False)
    return bare


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
