"""Converts an argument that a model wrote as text to JSON, by the types in its function's schema."""

import ast
import json
import warnings
from collections.abc import Mapping
from functools import cached_property

from trtforge.core.errors import ForgeError
from trtforge.core.json_schema import referred, type_of
from trtforge.core.json_text import parse_json

Types = frozenset[str]
"""Names of JSON Schema's types."""
Values = tuple[Types, frozenset[str]]
"""The types of values, and the strings among listed values."""
TEXT: Types = frozenset({"string"})
ANY: Types = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_NO_TEXTS = frozenset[str]()
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_PYTHON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
"""Python's names of types, which clients also write in schemas."""
_DEEPEST = 20
_LONGEST_LITERAL = 32_768
"""Characters. Python's parser takes up to 500 times as much memory."""


class ArgumentTypes:
    """The types of one function's arguments, from the `schema` of the arguments object.

    Each part of the schema is read only once, as it comes from a client and may be large.
    """

    def __init__(self, schema: Mapping[str, object]) -> None:
        self._root = schema
        self._references: dict[str, Values] = {}
        self._parts: dict[int, Values] = {}  # by identity; the schema keeps them alive

    def of(self, name: str) -> Values:
        """The types of an argument (all types if the schema gives none) and the strings of its `enum` and `const`."""
        found = [self._of_part(_property(each, name)) for each in self._objects]
        types = ANY.intersection(*(types for types, _ in found)) or ANY
        return types, _NO_TEXTS.union(*(texts for _, texts in found))

    @cached_property
    def _objects(self) -> list[Mapping[str, object]]:
        """The schemas that apply to the object: the root, and those in its `allOf` and `$ref`."""
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
        """The types and strings that a schema allows. Circular references allow all."""
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return ANY, _NO_TEXTS
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
                self._references[reference] = ANY, _NO_TEXTS
                self._references[reference] = self._read(_referred(reference, self._root), depth + 1)
            applied.append(self._references[reference])
        texts.update(*(each for _, each in applied))
        return ANY.intersection(*types, *(each for each, _ in applied)) or ANY, frozenset(texts)


def as_json(text: str, types: Types) -> str:
    """The text as a value of one of the types: parsed as JSON (or Python's True, False, None), else as a string.

    Where no string is expected, booleans are read in any case, and objects and arrays also as Python's literals.
    """
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    if "boolean" in types and "string" not in types and bare.lower() in ("true", "false"):
        bare = bare.lower()
    try:
        value = parse_json(bare, "the argument", hint="", unique=False)
        json.dumps(value, allow_nan=False)
    except (ForgeError, ValueError):
        literal = None if "string" in types else _literal(bare, types)
        return json.dumps(text, ensure_ascii=False) if literal is None else literal
    found = _type(value)
    if "string" in types and types != ANY and (found not in types or found == "string"):
        return json.dumps(text, ensure_ascii=False)
    return bare


def _literal(text: str, types: Types) -> str | None:
    """JSON of an object or array that is written as a Python literal, such as `{'a': True}`; None for anything else."""
    if types.isdisjoint(("object", "array")) or not text.startswith(("{", "[", "(")) or len(text) > _LONGEST_LITERAL:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes in strings
            value = ast.literal_eval(text)
        value = parse_json(json.dumps(value, allow_nan=False), "the argument", hint="")
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, ForgeError):
        return None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else None


def _property(schema: Mapping[str, object], name: str) -> object:
    """The schema of a property, from an object schema's `properties` or `additionalProperties`."""
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    return properties.get(name, others) if isinstance(properties, dict) else others


def _listed(given: object) -> list[object]:
    return given if isinstance(given, list) else []


def _named(given: object) -> Types:
    listed = given if isinstance(given, list) else [given]
    named = frozenset(_PYTHON_TYPES.get(each, each) for each in listed if isinstance(each, str))
    return (named | {"integer"} if "number" in named else named) or ANY


def _referred(reference: str, root: object) -> object:
    """The part of the schema at a reference; None if it does not exist."""
    try:
        return referred(reference, root)
    except (ValueError, KeyError):
        return None


def _type(value: object) -> str:
    """The JSON Schema type of a value; 5.0 counts as a number, not as an integer."""
    return "number" if isinstance(value, float) else type_of(value)
