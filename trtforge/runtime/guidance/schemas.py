"""Translates JSON schemas to the part of JSON Schema that xgrammar enforces; refuses the rest and names its place.

xgrammar 0.2 ignores many keywords, alone or in combination, without an error. This module resolves references, merges
schemas that apply together and separates types, so that each answer is valid for the original schema. Keywords that
JSON Schema does not define are annotations, as in its specification. The translation allows fewer answers than the
schema: objects have only the properties that it names unless it allows others explicitly; patterns match whole strings.
"""

import time
from collections.abc import Mapping
from functools import partial
from itertools import chain, islice
from typing import Any

from trtforge.core.json_schema import referred
from trtforge.runtime.guidance.patterns import automaton_work, optional_parts
from trtforge.runtime.guidance.schema_merging import both, disjoint
from trtforge.runtime.guidance.schema_objects import object_schema
from trtforge.runtime.guidance.schema_types import (
    ASSERTIONS,
    FORMATS,
    Place,
    enumerated,
    inferred_types,
    of_length,
    typed,
    value_key,
)
from trtforge.runtime.guidance.unenforced import Unenforced, Unsatisfiable

_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf")
_REFUSED = (
    *("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "contains"),
    *("$dynamicRef", "$recursiveRef"),
)
_MOST_PARTS = 20_000
_MOST_MERGES = 100_000
"""Maximum schemas that are merged with others, each as often as it is: about a second."""
_COPIED = 20  # properties, which a merge copies, that count as one merge more
_MOST_SECONDS = 5.0
"""CPU time limit of one translation, which occupies the engine's process; large permitted schemas take two seconds."""
_MOST_PAIRS = 1_000_000
"""Maximum pairs of branches of a oneOf that are compared: about three seconds."""
_MOST_MULTIPLES = 100_000
"""Maximum values of all integers with multipleOf and both bounds, each of which becomes a part of the grammar."""
_MOST_WORK = 10_000
"""Maximum total repetitions in patterns with groups: about ten seconds of compilation."""
_MOST_LEFT_OUT = 160_000
"""Maximum sum, over patterns, of the square of the number of optional parts: about ten seconds of compilation."""
_MOST_OPTIONAL = 500
"""Maximum properties of an object with optional ones, or the same work in several: about five compilation seconds."""
_MOST_LEVELS = 100
_MARK = "x-number"
"""Distinguishes schemas that differ only in names or values called title or description, which xgrammar ignores."""
_INFERRED = "x-inferred"

Schema = Mapping[str, Any]


def enforceable(schema: object, *, controls: bool) -> Schema:
    """The schema for xgrammar. `controls`: the vocabulary has control characters. Raises Unenforced."""
    translation = _Translation(schema, controls=controls)
    root = translation.node(schema, "#")
    _require_ends(root, translation.definitions)
    translation.require_exclusive()
    return {**root, "$defs": translation.definitions} if translation.definitions else root


class _Translation:
    """The translation of one schema. `definitions`: the targets of its references."""

    def __init__(self, root: object, *, controls: bool) -> None:
        self._controls = controls
        self._work = self._optional = self._left_out = self._multiples = 0
        self._end = time.thread_time() + _MOST_SECONDS
        self.definitions: dict[str, Schema] = {}
        self._root = root
        self._names: dict[str, str] = {}
        self._parts = self._merges = self._depth = 0
        self._exclusive: list[tuple[list[Schema], Place]] = []

    def node(self, schema: object, where: Place) -> Schema:
        """The translation of a part of the schema."""
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise Unenforced(f"the schema has more than {_MOST_PARTS} parts")
        self._require_time()
        self._depth += 1
        if self._depth > _MOST_LEVELS:
            raise Unenforced(f"the schema has more than {_MOST_LEVELS} levels, references included")
        try:
            return self._translated(schema, where)
        finally:
            self._depth -= 1

    def _require_time(self) -> None:
        if time.thread_time() > self._end:
            raise Unenforced(f"the schema takes longer than {_MOST_SECONDS:.0f} s to translate")

    def _translated(self, schema: object, where: Place) -> Schema:
        own, applied = _parts(schema, where)
        if not own and len(applied) == 1:
            if "$ref" in applied:
                return self._reference(applied["$ref"], where)
            if "allOf" in applied and len(members := _members(applied, "allOf", where)) == 1:
                return self.node(members[0], f"{where}/allOf/0")
        choices: list[tuple[str, list[object]]] = []
        asserted = self._merged(schema, where, choices, 0)
        if not choices:
            return self._asserted(asserted, where)
        if len(choices) > 1:
            raise Unenforced(f"{where}: more than one anyOf or oneOf for one value is not supported")
        keyword, branches = choices[0]
        return self._chosen(asserted, keyword, branches, where)

    def require_exclusive(self) -> None:
        """Raises Unenforced for a oneOf with overlapping branches. Call it after all references are translated."""
        for branches, where in self._exclusive:
            values = [branch for branch in branches if "enum" in branch]
            others = [branch for branch in branches if "enum" not in branch]
            if len(others) * len(branches) > 2 * _MOST_PAIRS:
                raise Unenforced(f"{where}: oneOf has {len(branches)} branches, too many to compare; use anyOf")
            if not _differ(values) or not self._are_disjoint(others, values):
                raise Unenforced(
                    f"{where}: the branches of oneOf may overlap, so that a value could fit two; use anyOf, "
                    "or give each a required property with a const of its own"
                )

    def _are_disjoint(self, branches: list[Schema], others: list[Schema]) -> bool:
        """Whether certainly no value is valid for two of the branches, or for a branch and one of the others."""
        for index, branch in enumerate(branches):
            self._require_time()
            before = chain(others, islice(branches, index))
            if not all(disjoint(branch, other, self.definitions) for other in before):
                return False
        return True

    def _chosen(self, asserted: Schema, keyword: str, branches: list[object], where: Place) -> Schema:
        """The branches, each merged with the assertions beside them."""
        made, empty = [], None
        for index, branch in enumerate(branches):
            place = f"{where}/{keyword}/{index}"
            try:
                made.append(self.node({"allOf": [asserted, branch]} if asserted else branch, place))
            except Unsatisfiable as error:  # other branches may still allow a value
                if keyword == "oneOf":
                    raise
                empty = error
        if empty is not None and not made:
            raise empty
        if keyword == "oneOf":
            self._exclusive.append((made, where))
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _merged(self, schema: object, where: Place, choices: list[tuple[str, list[object]]], depth: int) -> Schema:
        """All assertions about a value here, in references and in allOf; appends its anyOf and oneOf to `choices`."""
        if depth > _MOST_LEVELS:
            raise Unenforced(
                f"{where}: references or allOf follow one another without end, or more than {_MOST_LEVELS} deep"
            )
        found, applied = _parts(schema, where)
        if "$ref" in applied:
            target, place = self._target(applied["$ref"], where)
            found = self._both(found, self._merged(target, place, choices, depth + 1), where)
        for index, member in enumerate(_members(applied, "allOf", where) if "allOf" in applied else ()):
            found = self._both(found, self._merged(member, f"{where}/allOf/{index}", choices, depth + 1), where)
        choices += [(name, _members(applied, name, where)) for name in ("anyOf", "oneOf") if name in applied]
        return found

    def _both(self, one: Schema, other: Schema, where: Place) -> Schema:
        made = both(one, other, where)
        named = made.get("properties")
        self._merges += 1 + (len(named) // _COPIED if isinstance(named, dict) else 0)
        if self._merges > _MOST_MERGES:
            raise Unenforced(f"{where}: more than {_MOST_MERGES} schemas are merged, references included")
        self._require_time()
        return made

    def _asserted(self, asserted: Schema, where: Place) -> Schema:
        """The assertions as one schema per type."""
        if "enum" in asserted or "const" in asserted:
            return {"enum": enumerated(asserted, where), _MARK: self._parts}
        if not asserted:
            return {}
        types, inferred = inferred_types(asserted, where)
        made = []
        for each in types:
            make = object_schema if each == "object" else partial(typed, each)
            own = dict(make(asserted, where, self.node))
            if self._controls and (pattern := of_length(own)) is not None:
                own = {"type": "string", "pattern": pattern}
            self._multiples += len(own.get("enum", ()))
            if self._multiples > _MOST_MULTIPLES:
                raise Unenforced(f"{where}: multipleOf with more than {_MOST_MULTIPLES} values together")
            self._bound(own, where)
            if "properties" in own:
                own[_MARK] = self._parts
            if inferred:
                own[_INFERRED] = True
            made.append(own)
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _bound(self, schema: Schema, where: Place) -> None:
        """Raises Unenforced for a schema that would take long to compile."""
        patterns = [schema.get("pattern"), schema.get("propertyNames", {}).get("pattern")]
        self._left_out += sum(
            optional_parts(each) ** 2 for each in (*patterns, *schema.get("patternProperties", ())) if each
        )
        if self._left_out > _MOST_LEFT_OUT:
            raise Unenforced(f"{where}: the patterns have too many optional parts")
        self._work += sum(automaton_work(each) for each in (*patterns, *schema.get("patternProperties", ())) if each)
        if self._work > _MOST_WORK:
            raise Unenforced(f"{where}: the repetitions in the patterns add up to more than {_MOST_WORK}")
        if len(schema.get("required", ())) < len(named := schema.get("properties", {})):
            self._optional += len(named) ** 2
        if self._optional > _MOST_OPTIONAL**2:
            raise Unenforced(f"{where}: more than {_MOST_OPTIONAL} optional properties are not supported")

    def _reference(self, reference: object, where: Place) -> Schema:
        target, place = self._target(reference, where)
        name = self._names.get(place)
        if name is None:
            name = self._names[place] = f"d{len(self._names)}"
            self.definitions[name] = self.node(target, place)
        return {"$ref": f"#/$defs/{name}"}

    def _target(self, reference: object, where: Place) -> tuple[object, Place]:
        """The target of a reference, and its place."""
        if not isinstance(reference, str):
            raise Unenforced(f"{where}: $ref must be a string")
        try:
            return referred(reference, self._root), reference
        except ValueError:
            raise Unenforced(f"{where}: the reference {reference[:80]!r} does not begin with #/") from None
        except KeyError as missing:
            raise Unenforced(f"{where}: Cannot find field {missing.args[0][:80]} in {reference[:80]}") from None


def _parts(schema: object, where: Place) -> tuple[Schema, Schema]:
    """A schema's own assertions, and the keywords that apply other schemas to the same value."""
    if schema is True:
        return {}, {}
    if schema is False:
        raise Unsatisfiable(f"{where}: the schema false allows no value")
    if not isinstance(schema, dict):
        raise Unenforced(f"{where}: a schema must be an object or a boolean")
    for keyword in _REFUSED:
        if keyword in schema:
            raise Unenforced(f"{where}: {keyword} is not supported")
    named = schema.get("format", "")
    if not isinstance(named, str):
        raise Unenforced(f"{where}: format must be a string")
    ignored = "" if named in FORMATS else "format"
    own = {key: value for key, value in schema.items() if key in ASSERTIONS and key != ignored}
    return own, {key: schema[key] for key in _APPLICATORS if key in schema}


def _members(applied: Schema, keyword: str, where: Place) -> list[object]:
    members = applied[keyword]
    if not isinstance(members, list) or not members:
        raise Unenforced(f"{where}: {keyword} must be an array of at least one schema")
    return members


def _differ(branches: list[Schema]) -> bool:
    """Whether these enumerations have no common value; one may have a value twice."""
    keys = [key for branch in branches for key in set(map(value_key, branch["enum"]))]
    return len(set(keys)) == len(keys)


def _require_ends(root: Schema, definitions: Mapping[str, Schema]) -> None:
    """Raises Unenforced for a schema whose references to itself allow no finite value."""
    ending: set[str] = set()
    while more := {name for name in definitions.keys() - ending if _ends(definitions[name], ending)}:
        ending |= more
    if len(ending) < len(definitions) or not _ends(root, ending):
        raise Unenforced("the schema refers to itself without an end: every value would be infinite")


def _ends(schema: Schema, ending: set[str]) -> bool:
    """Whether the schema has a finite value, given the definitions that have one."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2] in ending
    if "anyOf" in schema:
        return any(_ends(each, ending) for each in schema["anyOf"])
    if schema.get("type") == "array":
        needed, places = schema.get("minItems", 0), schema.get("prefixItems", ())
        rest = needed <= len(places) or (schema["items"] is not False and _ends(schema["items"], ending))
        return rest and all(_ends(each, ending) for each in places[:needed])
    if schema.get("type") == "object":
        named = schema.get("properties", {})
        others = [schema["additionalProperties"], *schema.get("patternProperties", {}).values()]
        free = (
            all(_ends(each, ending) for each in others if each) if schema.get("minProperties", 0) > len(named) else True
        )
        return free and all(_ends(named[name], ending) for name in schema.get("required", ()))
    return True
