"""Translates a JSON schema's assertions about objects to forms that xgrammar enforces: names, values, counts."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtforge.runtime.guidance.patterns import json_expression
from trtforge.runtime.guidance.schema_types import Node, Place, Schema, of_length, size_range
from trtforge.runtime.guidance.unenforced import Unenforced, Unsatisfiable

_NAMING = ("properties", "patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties")
_CHARACTER = '[^"\\\\\\x00-\\x1f{}]'
_JSON_ESCAPES = re.compile(r'["\\\x00-\x1f]')
_MOST_SPELLED = 1_000_000
"""Maximum characters of an expression for other names than the properties', which repeats each beginning of a name."""
_MOST_COUNTED = 40
"""Maximum named properties of an object with a bounded count: xgrammar makes rules for each name and count."""


@dataclass(frozen=True)
class _Names:
    """Schemas of properties: `named` ones, those with names that match `pattern`, and `others`. None: not allowed."""

    named: Mapping[str, object]
    pattern: tuple[str, object] | None
    others: object | None


def object_schema(asserted: Schema, where: Place, node: Node) -> Schema:
    """The schema of an object. `node` translates the schemas of its properties."""
    required = _required(asserted, where)
    names = _with_names(_names(asserted, where), asserted, where, node)
    names = _with_required(names, required, asserted, where)
    made: dict[str, Any] = {"type": "object"}
    if names.named:
        made["properties"] = {name: node(each, f"{where}/properties/{name}") for name, each in names.named.items()}
        made["required"] = required
    if names.pattern is not None:
        made["patternProperties"] = {
            json_expression(names.pattern[0]): node(names.pattern[1], f"{where}/patternProperties")
        }
    made["additionalProperties"] = (
        False if names.others is None else node(names.others, f"{where}/additionalProperties")
    )
    if names.named and names.others is not None:
        if sum(len(name) ** 2 for name in names.named) > 2 * _MOST_SPELLED:
            raise Unenforced(f"{where}: the names in properties are too long to allow additional properties")
        made["propertyNames"] = {"type": "string", "pattern": json_expression(_other_names(names.named))}
    return made | _sizes(asserted, names, required, where)


def _names(asserted: Schema, where: Place) -> _Names:
    """The names of properties, before `required` and `propertyNames` are applied."""
    named, patterns = (_object_of(asserted, keyword, where) for keyword in ("properties", "patternProperties"))
    others = asserted.get("additionalProperties", asserted.get("unevaluatedProperties"))
    if others is None:
        others = not any(keyword in asserted for keyword in _NAMING)
    if not patterns:
        return _Names(named, None, None if others is False else others)
    if named:
        raise Unenforced(f"{where}: properties and patternProperties together are not supported")
    if isinstance(others, dict):
        raise Unenforced(f"{where}: patternProperties and a schema of additionalProperties together are not supported")
    if len(patterns) > 1:
        raise Unenforced(f"{where}: more than one pattern in patternProperties is not supported")
    return _Names({}, next(iter(patterns.items())), None)


def _with_names(names: _Names, asserted: Schema, where: Place, node: Node) -> _Names:
    """`names` with `propertyNames` applied."""
    if asserted.get("propertyNames", True) is True:
        return names
    place = f"{where}/propertyNames"
    allowed = node({"allOf": [{"type": "string"}, asserted["propertyNames"]]}, place)
    if names.pattern is not None:
        raise Unenforced(f"{where}: patternProperties and propertyNames together are not supported")
    others = names.others
    if others is None and not any(key in asserted for key in ("additionalProperties", "unevaluatedProperties")):
        others = True
    if "enum" in allowed:
        named = {
            name: names.named.get(name, others) for name in allowed["enum"] if name in names.named or others is not None
        }
        return _Names(named, None, None)
    if allowed == {"type": "string"}:
        return replace(names, others=others)
    pattern = allowed.get("pattern") or of_length(allowed)
    if names.named or pattern is None:
        raise Unenforced(
            f"{place}: only enum and const are supported with properties, without them also pattern and length"
        )
    return _Names({}, None if others is None else (pattern, others), None)


def _with_required(names: _Names, required: Sequence[str], asserted: Schema, where: Place) -> _Names:
    """`names` with all required names as named properties."""
    missing = [name for name in required if name not in names.named]
    if not missing:
        return names
    closed = any(asserted.get(key) is False for key in ("additionalProperties", "unevaluatedProperties"))
    if names.pattern is not None or "propertyNames" in asserted or closed:
        raise Unsatisfiable(f"{where}: the required property {missing[0][:80]!r} is none of the properties")
    others = True if names.others is None else names.others
    return replace(names, named={**names.named, **dict.fromkeys(missing, others)})


def _required(asserted: Schema, where: Place) -> list[str]:
    required = asserted.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise Unenforced(f"{where}: required must be an array of strings")
    return list(dict.fromkeys(required))


def _object_of(asserted: Schema, keyword: str, where: Place) -> Mapping[str, object]:
    found = asserted.get(keyword, {})
    if not isinstance(found, dict):
        raise Unenforced(f"{where}: {keyword} must be an object")
    return found


def _sizes(asserted: Schema, names: _Names, required: Sequence[str], where: Place) -> dict[str, int]:
    """minProperties and maxProperties, if they restrict more than the names do."""
    low, high = size_range(asserted, "minProperties", "maxProperties", where)
    is_open = names.pattern is not None or names.others is not None
    if high is not None and high < len(required):
        raise Unsatisfiable(f"{where}: maxProperties is {high}, but {len(required)} properties are required")
    if not is_open and low > len(names.named):
        raise Unsatisfiable(f"{where}: minProperties is {low}, but only {len(names.named)} properties are allowed")
    if is_open and low > len(required) + 1:
        raise Unenforced(f"{where}: minProperties is {low}, but names may repeat; list the names in properties")
    made = {"minProperties": low} if low > len(required) else {}
    if high is not None and (is_open or high < len(names.named)):
        made["maxProperties"] = high
    if made and len(names.named) > _MOST_COUNTED:
        raise Unenforced(
            f"{where}: minProperties and maxProperties are not supported with more than {_MOST_COUNTED} properties"
        )
    return made


def _other_names(named: Iterable[str]) -> str:
    """A pattern of all names but these, so that none of these can occur again, in any spelling.

    The pattern matches no characters that JSON escapes, so named properties that contain them need no exclusion.
    """
    named = dict.fromkeys(name for name in named if not _JSON_ESCAPES.search(name))
    following: dict[str, set[str]] = {"": set()}
    for name in named:
        for end, character in enumerate(name):
            following.setdefault(name[:end], set()).add(character)
            following.setdefault(name[: end + 1], set())
    parts = []
    for begin, characters in following.items():
        excluded = "".join(_escaped(each) for each in sorted(characters))
        longer = f"{_CHARACTER.format(excluded)}.*"
        text = "".join(_escaped(each) for each in begin)
        parts.append(text + (longer if begin in named else f"({longer})?"))
    return f"^({'|'.join(parts)})$"


def _escaped(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\u{{{ord(character):x}}}"
