"""Translates a JSON schema's assertions about values of one type to forms that xgrammar enforces."""

import math
from collections.abc import Callable, Hashable, Mapping
from fractions import Fraction
from typing import Any

from trtforge.core.json_schema import type_of
from trtforge.runtime.guidance.patterns import json_expression
from trtforge.runtime.guidance.unenforced import Unenforced, Unsatisfiable

Place = str
"""A JSON pointer."""
Schema = Mapping[str, Any]
Node = Callable[[object, Place], Schema]

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRINGS = ("minLength", "maxLength", "pattern", "format")
_ARRAYS = ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems")
_OBJECTS = (
    *("properties", "required", "patternProperties", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "minProperties", "maxProperties"),
)
ASSERTIONS = frozenset(("type", "enum", "const", *_NUMBERS, *_STRINGS, *_ARRAYS, *_OBJECTS))
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_UNSUPPORTED_FORMATS = (
    *("json-pointer", "relative-json-pointer"),  # xgrammar would not escape quotation marks
    *("idn-email", "idn-hostname", "iri", "iri-reference", "regex"),  # xgrammar does not know them
)
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(\d{3}[1-9]|\d\d[1-9]\d|\d[1-9]\d\d|[1-9]\d{3})"
_DATE = rf"({_YEAR}-((0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)|{_LEAP}-02-29)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+\-]([01]\d|2[0-3]):[0-5]\d)"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}"
_IPV6 = "|".join(
    (
        rf"({_GROUP}:){{7}}{_GROUP}",
        rf"({_GROUP}:){{1,7}}:",
        *(rf"({_GROUP}:){{1,{7 - after}}}(:{_GROUP}){{1,{after}}}" for after in range(1, 7)),
        rf":(:{_GROUP}){{1,7}}",
        "::",
        rf"({_GROUP}:){{6}}{_IPV4}",
        rf"({_GROUP}:){{1,5}}:{_IPV4}",
        *(rf"({_GROUP}:){{1,{5 - after}}}(:{_GROUP}){{1,{after}}}:{_IPV4}" for after in range(1, 5)),
        rf"::({_GROUP}:){{0,5}}{_IPV4}",
    )
)
_LABEL = "[0-9A-Za-z]([0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_OWN_FORMATS = {
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv6": f"({_IPV6})",
    "ipv4": _IPV4,
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "time": _TIME,
}
"""Formats whose expressions in xgrammar allow too much: impossible dates, octets with leading zeros, long labels."""
FORMATS = frozenset(
    (
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
        *("uri", "uri-reference", "uri-template", *_UNSUPPORTED_FORMATS),
    )
)
"""The formats of JSON Schema; any other format is an annotation."""
_MOST_COUNT = 2**31 - 1
_MOST_INTEGER = 2**63 - 1
_MOST_MULTIPLES = 10_000
_LARGEST_FACTOR = 1000
_DECIMALS = 6
"""Maximum decimal places of numbers with bounds."""


def inferred_types(asserted: Schema, where: Place) -> tuple[list[str], bool]:
    """The schema's types and False; if it names none, the types that it has assertions about, and True."""
    if "type" in asserted:
        given = asserted["type"] if isinstance(asserted["type"], list) else [asserted["type"]]
        for each in given:
            if each not in _TYPES:
                raise Unenforced(f'{where}: Unsupported type "{each}"')
        if not given:
            raise Unenforced(f"{where}: type is an empty list")
        return [each for each in _TYPES if each in given and not (each == "integer" and "number" in given)], False
    groups = {"number": _NUMBERS, "string": _STRINGS, "array": _ARRAYS, "object": _OBJECTS}
    return [name for name, keywords in groups.items() if any(each in asserted for each in keywords)], True


def typed(name: str, asserted: Schema, where: Place, node: Node) -> Schema:
    """The schema of one type other than object. `node` translates the schemas in it."""
    match name:
        case "integer":
            return _integer(asserted, where)
        case "number":
            return _number(asserted, where)
        case "string":
            return _string(asserted, where)
        case "array":
            return _array(asserted, where, node)
    return {"type": name}


def enumerated(asserted: Schema, where: Place) -> list[Any]:
    """The values of enum and const that have the schema's type."""
    given = asserted.get("enum", [asserted.get("const")])
    if not isinstance(given, list) or not given:
        raise Unenforced(f"{where}: enum must be an array of at least one value")
    others = asserted.keys() - {"enum", "const", "type"}
    if others:
        raise Unenforced(f"{where}: {min(others)} beside enum or const is not supported")
    if "const" in asserted:
        given = [value for value in given if same(value, asserted["const"])]
    if "type" in asserted:
        types, _ = inferred_types(asserted, where)
        given = [
            value for value in given if type_of(value) in types or (type_of(value) == "integer" and "number" in types)
        ]
    if not given:
        raise Unsatisfiable(f"{where}: no value of enum and const is left")
    for value in given:
        _require_exact(value, where)
    return given


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON: 1 equals 1.0, but true does not equal 1."""
    return value_key(one) == value_key(other)


def value_key(value: Any) -> Hashable:
    """A key of a JSON value; equal values (`same`) have equal keys."""
    if isinstance(value, list):
        return ("array", *map(value_key, value))
    if isinstance(value, dict):
        return frozenset((name, value_key(each)) for name, each in value.items())
    return ("boolean", value) if isinstance(value, bool) else value


def _require_exact(value: Any, where: Place) -> None:
    """Raises Unenforced for a number that xgrammar would write differently."""
    if isinstance(value, int) and abs(value) > _MOST_INTEGER:
        raise Unenforced(f"{where}: whole numbers of more than 64 bits are not supported")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_exact(each, where)


def _bound(asserted: Schema, keyword: str, where: Place) -> Fraction | None:
    value = asserted.get(keyword)
    if value is None and keyword not in asserted:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Unenforced(f"{where}: {keyword} must be a number")
    return Fraction(repr(value))


def _bounds(asserted: Schema, where: Place, step: Fraction) -> tuple[int | None, int | None]:
    """The smallest and the largest multiple of `step` within the bounds, divided by `step`."""
    least, above, most, below = (
        _bound(asserted, name, where) for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    )
    lows = [math.ceil(least / step)] if least is not None else []
    lows += [math.floor(above / step) + 1] if above is not None else []
    highs = [math.floor(most / step)] if most is not None else []
    highs += [math.ceil(below / step) - 1] if below is not None else []
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        kind = "whole number" if step.denominator == 1 else f"number with {_DECIMALS} decimals"
        raise Unsatisfiable(f"{where}: no {kind} lies within the bounds")
    return low, high


def _factor(asserted: Schema, where: Place) -> int:
    """multipleOf; 1 if every whole number satisfies it."""
    factor = _bound(asserted, "multipleOf", where)
    if factor is None:
        return 1
    if factor <= 0:
        raise Unenforced(f"{where}: multipleOf must be greater than 0")
    if factor.numerator != 1 and factor.denominator != 1:
        raise Unenforced(f"{where}: multipleOf {float(factor):g} is not supported")
    return factor.numerator


def _integer(asserted: Schema, where: Place) -> Schema:
    factor = _factor(asserted, where)
    low, high = _bounds(asserted, where, Fraction(factor))
    if factor > 1 and low is not None and high is not None:
        if high - low >= _MOST_MULTIPLES:
            raise Unenforced(f"{where}: multipleOf with more than {_MOST_MULTIPLES} values is not supported")
        return {"enum": [factor * each for each in range(low, high + 1)]}
    if factor > 1 and (low is not None or high is not None):
        raise Unenforced(f"{where}: multipleOf with one bound is not supported, give both or none")
    if factor > _LARGEST_FACTOR:
        raise Unenforced(f"{where}: multipleOf above {_LARGEST_FACTOR} is not supported")
    if any(each is not None and abs(each) > _MOST_INTEGER for each in (low, high)):
        raise Unenforced(f"{where}: bounds of more than 64 bits are not supported")
    made = {"type": "integer", "minimum": low, "maximum": high, "multipleOf": factor if factor > 1 else None}
    return {key: value for key, value in made.items() if value is not None}


def _number(asserted: Schema, where: Place) -> Schema:
    if "multipleOf" in asserted:
        if _bound(asserted, "multipleOf", where).denominator != 1:  # type: ignore[union-attr]
            raise Unenforced(f"{where}: multipleOf of numbers that are not whole is not supported")
        return _integer(asserted, where)
    _bounds(asserted, where, Fraction(1, 10**_DECIMALS))
    return {"type": "number", **{name: asserted[name] for name in _NUMBERS if name in asserted}}


def _count(asserted: Schema, keyword: str, where: Place) -> int | None:
    """A bound for characters, items or properties; None if it is absent or too large to be reached."""
    if keyword not in asserted:
        return None
    value = asserted[keyword]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Unenforced(f"{where}: {keyword} must be a whole number of at least 0")
    if value > _MOST_COUNT:
        if keyword.startswith("max"):
            return None
        raise Unenforced(f"{where}: {keyword} is {value}, at most {_MOST_COUNT} is supported")
    return value


def size_range(asserted: Schema, least: str, most: str, where: Place) -> tuple[int, int | None]:
    """The bounds for a number of characters, items or properties; None without an upper bound."""
    low, high = _count(asserted, least, where) or 0, _count(asserted, most, where)
    if high is not None and low > high:
        raise Unsatisfiable(f"{where}: {least} is {low}, {most} is {high}")
    return low, high


def of_length(schema: Schema) -> str | None:
    """A pattern for strings of the schema's lengths. It excludes control characters and takes longer to follow.

    None if the schema has no lengths.
    """
    if "minLength" not in schema and "maxLength" not in schema:
        return None
    return json_expression(f".{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}")


def _string(asserted: Schema, where: Place) -> Schema:
    low, high = size_range(asserted, "minLength", "maxLength", where)
    pattern, named = asserted.get("pattern"), asserted.get("format")
    if pattern is not None and not isinstance(pattern, str):
        raise Unenforced(f"{where}: pattern must be a string")
    if named in _UNSUPPORTED_FORMATS:
        raise Unenforced(f"{where}: the format {named} is not supported")
    if pattern is not None and named is not None:
        raise Unenforced(f"{where}: pattern and format together are not supported")
    lengths = ({"minLength": low} if low else {}) | ({} if high is None else {"maxLength": high})
    if lengths and (pattern is not None or named is not None):
        raise Unenforced(f"{where}: {min(lengths)} beside pattern or format is not supported")
    pattern = _OWN_FORMATS.get(str(named), pattern)
    if pattern is not None:
        return {"type": "string", "pattern": json_expression(pattern)}
    return {"type": "string", "format": named} if named is not None else {"type": "string", **lengths}


def _array(asserted: Schema, where: Place, node: Node) -> Schema:
    low, high = size_range(asserted, "minItems", "maxItems", where)
    if asserted.get("uniqueItems") and (high is None or high > 1):
        raise Unenforced(f"{where}: uniqueItems is not supported")
    places = asserted.get("prefixItems", [])
    if not isinstance(places, list):
        raise Unenforced(f"{where}: prefixItems must be an array")
    given = asserted.get("items", asserted.get("unevaluatedItems"))
    if isinstance(given, list):
        raise Unenforced(f"{where}: items must be a schema; prefixItems has one for each place")
    if given is None:
        given = not places or low > len(places)
    prefix = [node(each, f"{where}/prefixItems/{index}") for index, each in enumerate(places[:high])]
    if given is False and low > len(prefix):
        raise Unsatisfiable(f"{where}: minItems is {low}, but only {len(prefix)} items are allowed")
    made: dict[str, Any] = {"type": "array", "prefixItems": prefix} if prefix else {"type": "array"}
    free = given is not False and (high is None or high > len(prefix))
    made["items"] = node(given, f"{where}/items") if free else False
    made |= {"minItems": low} if low else {}
    return made | ({"maxItems": high} if free and high is not None else {})
