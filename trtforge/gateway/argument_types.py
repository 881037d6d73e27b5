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


class ArgumentTypes:
    """The types of one function's arguments, by the `schema` of the object of all.

    Each part of the schema is read once, however many arguments it is about: it is a client's, and may be large.
    """

    def __init__(self, schema: Mapping[str, object]) -> None:
        self._root = schema
        self._objects: list[Mapping[str, object]] | None = None
        self._types: dict[str, Types] = {}  # of references
        self._choices: dict[str, frozenset[str]] = {}  # of references
        self._found: dict[int, tuple[Types, frozenset[str]]] = {}  # of parts, by their identity: the schema holds them

    def of(self, name: str) -> tuple[Types, frozenset[str]]:
        """The types of an argument, all where the schema does not say; and the texts that `enum` and `const` list."""
        if self._objects is None:
            self._objects = _objects_in(self._root)
        found = [self._of_part(_property(each, name)) for each in self._objects]
        types = _ANY.intersection(*(types for types, _ in found)) or _ANY
        return types, frozenset().union(*(choices for _, choices in found))

    def _of_part(self, part: object) -> tuple[Types, frozenset[str]]:
        if not isinstance(part, dict):
            return _ANY, frozenset()
        if id(part) not in self._found:
            self._found[id(part)] = _types(part, self._root, self._types), self._choices_in(part)
        return self._found[id(part)]

    def _choices_in(self, schema: object, depth: int = 0) -> frozenset[str]:
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return frozenset()
        values = [*_listed(schema.get("enum")), schema.get("const")]
        found = {each for each in values if isinstance(each, str)}
        for kind in ("anyOf", "oneOf", "allOf"):
            found.update(*(self._choices_in(each, depth + 1) for each in _listed(schema.get(kind))))
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._choices:
                self._choices[reference] = frozenset()  # a loop adds nothing
                self._choices[reference] = self._choices_in(_referred(reference, self._root), depth + 1)
            found |= self._choices[reference]
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


def _objects_in(root: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The schemas of the object: `root`, and those that it says to apply too."""
    found, todo, seen = list[Mapping[str, object]](), list[object]([root]), set[str]()
    while todo:
        schema = todo.pop()
        if not isinstance(schema, dict):
            continue
        found.append(schema)
        todo += _listed(schema.get("allOf"))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            todo.append(_referred(reference, root))
    return found


def _property(schema: Mapping[str, object], name: str) -> object:
    """The schema that an object's says of a property, by `properties` or `additionalProperties`."""
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    return properties.get(name, others) if isinstance(properties, dict) else others


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
