"""Arguments of a call that stand between tags, as JSON: each has the type that the schema of its function says."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json
from trtforge.core.stop_text import overlap

_LONGEST_HEAD = 400
_DEEPEST = 20
_ANY = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_TEXT = frozenset({"string"})
_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class ParameterTags:
    """How one argument is written: `head` is all up to its value, and `end` what follows that.

    `begins_with`: what every head begins with; `ends`: the texts that `end` finds, the first of which ends a value.
    """

    head: re.Pattern[str]
    begins_with: str
    end: re.Pattern[str]
    ends: tuple[str, ...]


class TaggedArguments:
    """Follows the arguments of one call. `schema`: of the object of all arguments. `closed`: they are complete."""

    def __init__(self, tags: ParameterTags, schema: Mapping[str, object]) -> None:
        self._tags = tags
        self._schema = schema
        properties = schema.get("properties")
        self._schemas: Mapping[str, object] = properties if isinstance(properties, dict) else {}
        self._types: frozenset[str] | None = None  # of the value that has begun
        self._made = ""
        self._count = 0
        self.closed = False

    @property
    def waits(self) -> bool:
        """Whether nothing can be told until a value ends, which begins with the last character of a tag."""
        return self._types is not None and self._types != _TEXT

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
            self._types = _types(self._schemas.get(name), self._schema)
            self._made += f"{self._separator()}{json.dumps(name, ensure_ascii=False)}: "
            self._made += '"' if self._types == _TEXT else ""
            return head.end(), True
        ahead = text.lstrip()
        begins = self._tags.begins_with
        may_be = len(text) <= _LONGEST_HEAD and (begins.startswith(ahead) or ahead.startswith(begins))
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
        end = self._tags.end.search(text)
        held = max(overlap(text, each) for each in self._tags.ends)
        if end is None and reason in (None, "length"):
            size = len(text) - (held if reason is None else 0) if self._types == _TEXT else 0
            self._made += _escaped(text[:size])
            return size, False
        value = text[: end.start() if end else len(text) - held]
        self._made += f'{_escaped(value)}"' if self._types == _TEXT else _as_json(value, self._types or _ANY)
        self._types = None
        return end.end() if end else len(text), True


def _types(schema: object, root: Mapping[str, object], depth: int = 0) -> frozenset[str]:
    """JSON types of the values of a schema within `root`; all where it does not say."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return _ANY
    found = [_named_types(schema.get("type"))]
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        found += [frozenset(map(_type, values))] if isinstance(values, list) else []
    for kind in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(kind), list):
            found.append(frozenset().union(*(_types(each, root, depth + 1) for each in several)))
    if isinstance(every := schema.get("allOf"), list):
        found += [_types(each, root, depth + 1) for each in every]
    if isinstance(reference := schema.get("$ref"), str):
        found.append(_types(_referred(reference, root), root, depth + 1))
    return _ANY.intersection(*found) or _ANY


def _named_types(given: object) -> frozenset[str]:
    named = frozenset(each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str))
    return (named | {"integer"} if "number" in named else named) or _ANY


def _referred(reference: str, root: object) -> object:
    """What a reference within the schema, such as `#/$defs/Place`, names; None if there is no such place."""
    if not reference.startswith("#"):
        return None
    for key in reference.split("/")[1:]:
        root = root.get(key) if isinstance(root, dict) else None
    return root


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
    if "string" in types and types != _ANY and (found not in types or found == "string"):
        return json.dumps(text, ensure_ascii=False)
    return bare


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
