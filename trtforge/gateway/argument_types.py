"""The JSON of an argument that a model wrote as text, by the types that its function's schema says."""

import json
from collections.abc import Mapping
from functools import cached_property

from trtforge.core.errors import ForgeError
from trtforge.core.json_schema import referred, type_of
from trtforge.core.json_text import parse_json

Types = frozenset[str]
"""Names of JSON Schema's types."""
Values = tuple[Types, frozenset[str]]
"""The types of values, and the texts that are listed among them."""
TEXT: Types = frozenset({"string"})
_ANY: Types = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_NO_TEXTS = frozenset[str]()
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_DEEPEST = 20


class ArgumentTypes:
    """The types of one function's arguments, by the `schema` of the object of all.

    Each part of the schema is read once, however many arguments it is about: it is a client's, and may be large.
    """

    def __init__(self, schema: Mapping[str, object]) -> None:
        self._root = schema
        self._references: dict[str, Values] = {}
        self._parts: dict[int, Values] = {}  # by their identity: the schema holds them

    def of(self, name: str) -> Values:
        """The types of an argument, all where the schema does not say; and the texts that `enum` and `const` list."""
        found = [self._of_part(_property(each, name)) for each in self._objects]
        types = _ANY.intersection(*(types for types, _ in found)) or _ANY
        return types, _NO_TEXTS.union(*(texts for _, texts in found))

    @cached_property
    def _objects(self) -> list[Mapping[str, object]]:
        """The schemas of the object: the root, and those that it says to apply too."""
        found, todo, seen = list[Mapping[str, object]](), list[object]([self._root]), set[str]()
        while todo:
            schema = todo.pop()
            if not isinstance(schema, dict):
                continue
            found.append(schema)
            todo += _listed(schema.get("allOf"))
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                todo.append(_referred(reference, self._root))
        return found

    def _of_part(self, part: object) -> Values:
        if id(part) not in self._parts:
            self._parts[id(part)] = self._read(part)
        return self._parts[id(part)]

    def _read(self, schema: object, depth: int = 0) -> Values:
        """What a schema says of its values. A loop of references says nothing."""
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return _ANY, _NO_TEXTS
        types, texts = [_named(schema.get("type"))], set[str]()
        for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
            if isinstance(values, list):
                types.append(frozenset(map(_type, values)))
                texts.update(each for each in values if isinstance(each, str))
        for kind in ("anyOf", "oneOf"):
            if isinstance(several := schema.get(kind), list):
                read = [self._read(each, depth + 1) for each in several]
                types.append(Types().union(*(each for each, _ in read)))
                texts.update(*(each for _, each in read))
        applied = [self._read(each, depth + 1) for each in _listed(schema.get("allOf"))]
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._references:
                self._references[reference] = _ANY, _NO_TEXTS
                self._references[reference] = self._read(_referred(reference, self._root), depth + 1)
            applied.append(self._references[reference])
        texts.update(*(each for _, each in applied))
        return _ANY.intersection(*types, *(each for each, _ in applied)) or _ANY, frozenset(texts)


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


def _property(schema: Mapping[str, object], name: str) -> object:
    """The schema that an object's says of a property, by `properties` or `additionalProperties`."""
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    return properties.get(name, others) if isinstance(properties, dict) else others


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
