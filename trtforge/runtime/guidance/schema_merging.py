"""Merges two JSON schemas for one value, and checks whether two schemas exclude each other."""

from collections.abc import Mapping
from typing import Any

from trtforge.runtime.guidance.schema_types import Place, Schema, same, value_key
from trtforge.runtime.guidance.unenforced import Unenforced, Unsatisfiable

_LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_NAMES = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")
_ITEMS = ("items", "prefixItems", "unevaluatedItems")
_MOST_STEPS = 100


def both(one: Schema, other: Schema, where: Place) -> Schema:
    """One schema with the assertions of both. Raises Unenforced."""
    for keywords, own in ((_NAMES, ("properties",)), (_ITEMS, ())):
        theirs, ours = ({key: each[key] for key in keywords if key in each} for each in (one, other))
        if theirs and ours and theirs != ours and (theirs.keys() | ours.keys()) - set(own):
            raise Unenforced(f"{where}: {min(theirs)} and {max(ours)} of two schemas for one value are not supported")
    made = dict(one)
    for key, value in other.items():
        made[key] = _joined(key, made[key], value, where) if key in made else value
    return made


def _joined(key: str, one: Any, other: Any, where: Place) -> Any:
    if same(one, other):
        return one
    try:
        if key in _LARGER or key in _SMALLER:
            return max(one, other) if key in _LARGER else min(one, other)
        if key == "required":
            return [*one, *other]
        if key == "uniqueItems":
            return one or other
    except TypeError:
        raise Unenforced(f"{where}: {key} has a value of another type") from None
    if key == "properties" and isinstance(one, dict) and isinstance(other, dict):
        shared = {name: {"allOf": [one[name], other[name]]} for name in one.keys() & other.keys()}
        return {**one, **other, **shared}
    if key == "type":
        return _shared_types(_listed(one), _listed(other), where)
    if key == "enum" and isinstance(one, list) and isinstance(other, list):
        wanted = set(map(value_key, other))
        return [value for value in one if value_key(value) in wanted]
    raise Unenforced(f"{where}: two values of {key} for one value are not supported")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _shared_types(one: list[Any], other: list[Any], where: Place) -> list[Any]:
    shared = [each for each in one if each in other]
    if ("number" in one and "integer" in other) or ("integer" in one and "number" in other):
        shared = list(dict.fromkeys([*shared, "integer"]))
    if not shared:
        raise Unsatisfiable(f"{where}: the types {one} and {other} have no value in common")
    return shared


def disjoint(one: Schema, other: Schema, definitions: Mapping[str, Schema]) -> bool:
    """Whether certainly no value is valid for both of these translated schemas."""
    return _Comparison(definitions).disjoint(one, other)


class _Comparison:
    """A comparison of two schemas that gives up after a number of steps."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._steps = 0

    def disjoint(self, one: Schema, other: Schema) -> bool:
        """See `disjoint`."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            return False
        for first, second in ((one, other), (other, one)):
            if "$ref" in first:
                return self.disjoint(self._definitions[first["$ref"].rpartition("/")[2]], second)
            if "anyOf" in first:
                return all(self.disjoint(each, second) for each in first["anyOf"])
        if "x-inferred" in one or "x-inferred" in other or not one or not other:
            return False
        if "enum" in one and "enum" in other:
            return set(map(value_key, one["enum"])).isdisjoint(map(value_key, other["enum"]))
        for first, second in ((one, other), (other, one)):
            if "enum" in first:
                return not any(_may_be(value, second["type"]) for value in first["enum"])
        types = {one["type"], other["type"]}
        if types <= {"integer", "number"}:
            return _apart(one, other) or _apart(other, one)
        if len(types) > 1:
            return True
        return types == {"object"} and self._objects(one, other)

    def _objects(self, one: Schema, other: Schema) -> bool:
        """Whether a property required by both has no common value, or each requires one that the other forbids."""
        mine, theirs = one.get("properties", {}), other.get("properties", {})
        needed, wanted = set(one.get("required", ())), set(other.get("required", ()))
        if any(self.disjoint(mine[name], theirs[name]) for name in sorted(needed & wanted)):
            return True
        return _lacks(one, wanted) and _lacks(other, needed)


def _lacks(schema: Schema, names: set[str]) -> bool:
    """Whether this schema forbids at least one of these properties."""
    closed = schema["additionalProperties"] is False and "patternProperties" not in schema
    return closed and bool(names - schema.get("properties", {}).keys())


def _apart(low: Schema, high: Schema) -> bool:
    """Whether all numbers of `low` are below those of `high`."""
    most = min((low[key] for key in ("maximum", "exclusiveMaximum") if key in low), default=None)
    least = max((high[key] for key in ("minimum", "exclusiveMinimum") if key in high), default=None)
    if most is None or least is None:
        return False
    excluded = low.get("exclusiveMaximum") == most or high.get("exclusiveMinimum") == least
    return bool(most < least or (most == least and excluded))


def _may_be(value: Any, name: str) -> bool:
    kinds = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}
    if name in kinds:
        return isinstance(value, kinds[name])
    return isinstance(value, int | float) and not isinstance(value, bool)
