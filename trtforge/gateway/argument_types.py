"""The JSON of an argument that a model wrote as text, by the types that its function's schema says."""

import json
from collections.abc import Mapping

from trtforge.core.errors import ForgeError
from trtforge.core.json_schema import referred, type_of
from trtforge.core.json_text import parse_json

Types = frozenset[str]
"""Names of JSON Schema's types."""
TEXT: Types = frozenset({"string"})
_ANY: Types = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_DEEPEST = 20


def types_of(name: str, schema: Mapping[str, object]) -> Types:
    """The types of an argument; all where the schema of all arguments does not say."""
    known: dict[str, Types] = {}
    return _ANY.intersection(*(_types(each, schema, known) for each in _schemas_of(name, schema))) or _ANY


def choices_of(name: str, schema: Mapping[str, object]) -> frozenset[str]:
    """The texts that `enum` and `const` list for an argument."""
    found, todo, seen = set[str](), _schemas_of(name, schema), set[str]()
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            continue
        values = [*_listed(part.get("enum")), part.get("const")]
        found.update(each for each in values if isinstance(each, str))
        todo += [each for kind in ("anyOf", "oneOf", "allOf") for each in _listed(part.get(kind))]
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            todo.append(_referred(reference, schema))
    return frozenset(found)


def as_json(text: str, types: Types) -> str:
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


def _schemas_of(name: str, root: Mapping[str, object]) -> list[object]:
    """The schemas that hold for a property of `root`, as `properties` or `additionalProperties` say it."""
    found, todo, seen = list[object](), list[object]([root]), set[str]()
    while todo:
        schema = todo.pop()
        if not isinstance(schema, dict):
            continue
        properties = schema.get("properties")
        others = schema.get("additionalProperties")
        found.append(properties.get(name, others) if isinstance(properties, dict) else others)
        todo += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            todo.append(_referred(reference, root))
    return found


def _types(schema: object, root: Mapping[str, object], known: dict[str, Types], depth: int = 0) -> Types:
    """The types of a schema's values. `known`: of the references in `root` that were met; a loop says nothing."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return _ANY
    found = [_named(schema.get("type"))]
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        found += [frozenset(map(_type, values))] if isinstance(values, list) else []
    for kind in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(kind), list):
            found.append(Types().union(*(_types(each, root, known, depth + 1) for each in several)))
    if isinstance(every := schema.get("allOf"), list):
        found += [_types(each, root, known, depth + 1) for each in every]
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = _ANY
            known[reference] = _types(_referred(reference, root), root, known, depth + 1)
        found.append(known[reference])
    return _ANY.intersection(*found) or _ANY


def _listed(given: object) -> list[object]:
    return given if isinstance(given, list) else []


def _named(given: object) -> Types:
    named = frozenset(each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str))
    return (named | {"integer"} if "number" in named else named) or _ANY


def _referred(reference: str, root: object) -> object:
    """What a reference within the schema names; None if there is no such place."""
    try:
        return referred(reference, root)
    except (ValueError, KeyError):
        return None


def _type(value: object) -> str:
    """The type of a value as it is written: 5.0 is no integer."""
    return "number" if isinstance(value, float) else type_of(value)
