"""Schemas and expressions of which xgrammar alone would ignore a part: each is enforced or refused with its place."""

import json
from typing import Any

import jsonschema
import pytest
import xgrammar

from tests.conftest import DEMO_MODEL
from trtforge.core.errors import RequestError
from trtforge.engine_process.requests import Guide, GuideKind
from trtforge.runtime.guidance import schemas
from trtforge.runtime.guidance.grammars import Grammars
from trtforge.runtime.guidance.patterns import characters

GRAMMARS = Grammars(DEMO_MODEL, 2048)
NULL, ANY_INTEGER = {"type": "null"}, {"type": "integer"}


def allows(kind: GuideKind, guide: str, text: str) -> bool:
    """Whether an answer to a guide may be this text."""
    matcher = xgrammar.GrammarMatcher(GRAMMARS.compiled(Guide(kind, guide)), override_stop_tokens=[1])
    return matcher.accept_string(text) and matcher.is_completed()


def ladder(height: int) -> dict[str, Any]:
    """A schema whose references double at each step."""
    steps = {f"s{step}": {"allOf": [{"$ref": f"#/$defs/s{step - 1}"}] * 2} for step in range(1, height)}
    return {"$defs": {"s0": NULL, **steps}, "allOf": [{"$ref": f"#/$defs/s{height - 1}"}]}


def tag(schema: object) -> str:
    return json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}})


def named(name: str, schema: object) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema}, "required": [name]}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "object", "required": ["a"]}, '{"a": 1}', "{}"),
        ({"type": "object", "properties": {"b": NULL}, "required": ["a"]}, '{"b": null, "a": 1}', '{"b": null}'),
        ({"properties": {"a": NULL}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a": null}', "{}"),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, "4", "6"),
        ({"allOf": [ANY_INTEGER], "minimum": 300}, "300", "12"),
        ({"$ref": "#/$defs/a", "maximum": 6, "$defs": {"a": ANY_INTEGER}}, "6", "7"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": NULL}}, "null", "1"),
        ({"minimum": 10}, "10.5", "9"),
        ({"pattern": "^a$"}, '"a"', '"b"'),
        ({"enum": [1, "a", None], "type": ["string", "null"]}, '"a"', "1"),
        ({"type": "number", "multipleOf": 2}, "14", "15"),
        ({"type": "integer", "multipleOf": 7, "minimum": 13, "maximum": 10**4}, "14", "15"),
        ({"type": "integer", "minimum": 1.5}, "2", "1"),
        ({"type": "array", "prefixItems": [NULL, NULL], "maxItems": 1}, "[null]", "[null, null]"),
        ({"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": NULL}, '{"a": null}', '{"a": 1}'),
        ({"propertyNames": {"pattern": "^a+$"}, "additionalProperties": NULL}, '{"aa": null}', '{"aa": 1}'),
        ({"propertyNames": {"minLength": 2}, "additionalProperties": NULL}, '{"ab": null}', '{"a": null}'),
        ({"propertyNames": {"maxLength": 2}, "additionalProperties": NULL}, '{"é": null, "ab": null}', '{"abc": null}'),
        ({**named("ab", ANY_INTEGER), "additionalProperties": NULL}, '{"ab": 1}', '{"ab": 1, "\\u0061b": null}'),
        ({**named('a"b', ANY_INTEGER), "additionalProperties": NULL}, '{"a\\"b": 1, "ac": null}', '{"a": 1}'),
        ({**named('a"b', ANY_INTEGER), "additionalProperties": NULL}, '{"a\\"b": 1}', '{"a\\"b": 1, "a\\"b": null}'),
        ({**named("é", ANY_INTEGER), "additionalProperties": NULL}, '{"é": 1, "": null}', '{"é": 1, "\\u00e9": null}'),
        (
            {"type": "object", "properties": {name: {"const": {"title": name}} for name in "ab"}, "required": ["b"]},
            '{"b": {"title":"b"}}',
            '{"b": {"title":"a"}}',
        ),
        ({"oneOf": [named("a", {"const": name}) for name in "xy"]}, '{"a": "y"}', '{"a": "z"}'),
        ({"type": "string", "pattern": "^ü[^a]{2}$"}, '"üéb"', '"üab"'),
        ({"type": "string", "pattern": "^a$|^b$"}, '"b"', '"c"'),
        ({"type": "string", "pattern": "^((a){2,})?$"}, '"aa"', '"a"'),
        ({"type": "string", "pattern": r"^[!-~]\W[^\S]\x410$"}, '"a- A0"', '"aa A0"'),
        ({"type": "string", "minLength": 2, "maxLength": 3}, '"aé"', '"a"'),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"type": "string", "format": "ipv4"}, '"8.20.117.4"', '"008.20.117.4"'),
        ({"type": "string", "format": "ipv6"}, '"1::8.20.117.4"', '"1::8.20.117.04"'),
    ],
)  # fmt: skip
def test_what_xgrammar_would_ignore_is_enforced(schema: Any, valid: str, invalid: str) -> None:
    check = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    assert check.is_valid(json.loads(valid))
    assert not check.is_valid(json.loads(invalid))
    for kind, guide in (("json_schema", json.dumps(schema)), ("structural_tag", tag(schema))):
        assert allows(kind, guide, valid)  # type: ignore[arg-type]
        assert not allows(kind, guide, invalid)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["localhost", "a-1." + "b" * 63 + ".Example", "9.x"])
def test_labels_of_host_names_have_63_characters(name: str) -> None:
    """RFC 1123, 2.1. The package of JSON Schema does not check it."""
    guide = '{"type": "string", "format": "hostname"}'
    assert allows("json_schema", guide, json.dumps(name))
    for wrong in (f"-{name}", f"{name}-", f"{name}.", "b" * 64, f"{name}.{'b' * 64}", "a_b", ""):
        assert not allows("json_schema", guide, json.dumps(wrong)), wrong


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {}}, "#: not is not supported"),
        ({"type": "array", "items": {"contains": NULL}}, "#/items: contains is not supported"),
        ({"type": "array", "uniqueItems": True}, "#: uniqueItems is not supported"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "#: dependentRequired is not supported"),
        ({"type": "integer", "multipleOf": 7, "minimum": 0}, "#: multipleOf with one bound is not supported"),
        ({"type": "number", "multipleOf": 0.1}, "#: multipleOf of numbers that are not whole is not supported"),
        ({"oneOf": [ANY_INTEGER, {"type": "number"}]}, "#: the branches of oneOf may overlap"),
        ({"oneOf": [{"type": "string"}, {"minimum": 3}]}, "#: the branches of oneOf may overlap"),
        ({"anyOf": []}, "#: anyOf must be an array of at least one schema"),
        ({"anyOf": [False, False]}, "#/anyOf/1: the schema false allows no value"),
        ({"allOf": [NULL, ANY_INTEGER]}, r"#: the types \['null'\] and \['integer'\] have no value in common"),
        ({"$ref": "#"}, "the schema refers to itself without an end: every value would be infinite"),
        (named("a", {"$ref": "#"}), "the schema refers to itself without an end: every value would be infinite"),
        ({"$ref": "#a"}, "#: the reference '#a' does not begin with #/"),
        ({"const": 2**70}, "#: whole numbers of more than 64 bits are not supported"),
        ({"const": "a", "type": "integer"}, "#: no value of enum and const is left"),
        ({"enum": ["a"], "maxLength": 1}, "#: maxLength beside enum or const is not supported"),
        ({"type": "number", "minimum": 1e-9, "maximum": 2e-9}, "#: no number with 6 decimals lies within the bounds"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "#: no whole number lies within the bounds"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "#: maxLength beside pattern or format is not"),
        ({"type": "string", "pattern": 'a"b'}, "is always escaped in JSON, which is not supported"),
        ({"type": "string", "pattern": r"^[5-\d]$"}, r"the range 5-\\d in a regular expression is not one"),
        ({"type": "string", "pattern": r"^[\x22\t]$"}, "is always escaped in JSON, which is not supported"),
        ({"type": "string", "pattern": r"^\\\\$"}, "is always escaped in JSON, which is not supported"),
        ({"type": "string", "pattern": "[a-z]{0,9}" * 24}, "a regular expression has 207 optional parts"),
        (
            {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": "a?" * 200} for n in range(5)}},
            "the patterns have too many optional parts",
        ),
        ({"type": "string", "pattern": "^(a.{1,5000})$"}, "add up to more than 2000"),
        ({"prefixItems": [{"pattern": f"(a.{{1,{1994 + n}}})"} for n in range(6)]}, "add up to more than 10000"),
        ({"type": "string", "format": "json-pointer"}, "#: the format json-pointer is not supported"),
        ({"type": "string", "format": "idn-email"}, "#: the format idn-email is not supported"),
        ({"properties": {}, "patternProperties": {"a": {}}, "required": ["a"]}, "'a' is none of the properties"),
        ({**named("a", {}), "patternProperties": {"a": NULL}}, "properties and patternProperties together"),
        ({"additionalProperties": NULL, "minProperties": 2}, "minProperties is 2, but names may repeat"),
        ({"type": "object", "additionalProperties": False, "required": ["a"]}, "'a' is none of the properties"),
        ({"properties": {f"p{number}": {} for number in range(501)}}, "#: more than 500 optional properties are not"),
        ({"oneOf": [NULL, {**ANY_INTEGER, "minimum": 5, "maximum": 4}]}, "no whole number lies within the bounds"),
        (ladder(33), "more than 100000 schemas are merged, references included"),
        ({"allOf": [{"properties": {f"p{number}": {}}} for number in range(4000)]}, "100000 schemas are merged"),
        ({"oneOf": [named("a", {"const": number}) for number in range(1500)]}, "oneOf has 1500 branches"),
        ({"oneOf": [{"const": f"v{number % 3999}"} for number in range(4000)]}, "the branches of oneOf may overlap"),
        ({"properties": {"a" * 2000: {}}, "additionalProperties": NULL}, "the names in properties are too long"),
        ({"prefixItems": [{**ANY_INTEGER, "multipleOf": 2, "minimum": 0, "maximum": 19_998}] * 11}, "100000 values"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(RequestError, match=f"refused: .*{said}"):
        GRAMMARS.compiled(Guide("json_schema", json.dumps(schema)))
    with pytest.raises(RequestError, match=f"refused: .*{said}"):
        GRAMMARS.compiled(Guide("structural_tag", tag(schema)))


@pytest.mark.parametrize(
    ("schema", "invalid"),
    [
        ({"type": "string", "maxLength": 5}, '"a\tb"'),
        ({"type": "string", "pattern": "^ü[^a]b$"}, '"ü"b"'),
        ({"type": "string", "pattern": "^ü.b$"}, '"ü\\b"'),
    ],
)
def test_strings_are_json_in_structural_tags_too(schema: Any, invalid: str) -> None:
    assert not allows("structural_tag", tag(schema), invalid)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("[a-z]?" * 202, "a regular expression has 201 optional parts besides its largest, at most 200 are supported"),
        ("a(?=b)b", "lookahead in a regular expression is not supported"),
        ("a^b", r"\^ inside of a regular expression is not supported"),
        ("(a$)*b", r"\$ inside of a regular expression is not supported"),
        (r"a\Z", r"the escape \\Z in a regular expression is not supported"),
        (r"\bx", "Word boundary"),
        ("(?<=a)b", r"\(\?<= in a regular expression is not supported"),
        ("(?i)a", r"\(\?i in a regular expression is not supported"),
        ("(.{1,1000}){1,1000}", "nested repetitions multiply to more than 1000"),
        ("(" * 201 + ")" * 201, "more than 200 nested brackets"),
        ("(" * 100_000, "more than 200 nested brackets"),
        ("[" * 100_000, "a regular expression has no closing bracket"),
        ("a[^b\\", r"the part '\[\^b.*' of a regular expression has no closing bracket"),
    ],
)
def test_expressions_that_xgrammar_would_take_for_others_are_refused(pattern: str, said: str) -> None:
    for kind, guide in (("regex", pattern), ("json_schema", json.dumps({"type": "string", "pattern": pattern}))):
        with pytest.raises(RequestError, match=f"refused: .*{said}"):
            GRAMMARS.compiled(Guide(kind, guide))  # type: ignore[arg-type]


def test_a_translation_has_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "_MOST_SECONDS", -1.0)
    with pytest.raises(RequestError, match="the schema takes longer than -1 s to translate"):
        GRAMMARS.compiled(Guide("json_schema", json.dumps(named("a", {"const": "limit of time"}))))


def test_many_values_are_told_apart() -> None:
    values = {"allOf": [{"enum": [*range(9000), True, [1]]}, {"enum": [1.0, False, [True], *range(8000, 17000)]}]}
    for value, is_allowed in (("1", True), ("8999", True), ("7999", False), ("true", False), ("[1]", False)):
        assert allows("json_schema", json.dumps(values), value) == is_allowed
    constants = [{"const": value} for value in (*range(5000), False, "0", [0], {"a": 0})]
    one_of = {"oneOf": [NULL, {"enum": [-1, -1.0]}, *constants]}
    assert allows("json_schema", json.dumps(one_of), "4999")


def test_classes_of_many_characters_are_read_once() -> None:
    """Every second character from U+0400 on."""
    text = "".join(map(chr, range(0x400, 0xD7F0, 2)))
    for pattern, odd in ((f"[{text}]", False), (f"[^{text}]", True)):
        found = characters(pattern)
        assert any(first <= 0x401 <= last for first, last in found) == odd
        assert any(first <= 0xD7EE <= last for first, last in found) != odd
    assert characters("[c-eg\\-a]") == [(0x2D, 0x2D), (0x61, 0x61), (0x63, 0x65), (0x67, 0x67)]
    assert characters("[^\\x00-\\x60b-\\u{10ffff}]") == [(0x61, 0x61)]


def test_a_hyphen_after_an_escape_of_several_characters_is_one() -> None:
    """As xgrammar reads it outside of schemas, and JavaScript without the flag u."""
    schema = json.dumps({"type": "string", "pattern": r"^[\d-z]$"})
    for one, is_allowed in (("5", True), ("-", True), ("z", True), ("a", False)):
        assert allows("json_schema", schema, f'"{one}"') == allows("regex", r"[\d-z]", one) == is_allowed


def test_expressions_are_read_as_in_python() -> None:
    assert allows("regex", "(^a.$|^b$)", "a\\")
    assert not allows("regex", "a.b", "a\nb")
    assert allows("regex", r"[.]\.[^\n]", "..x")
    assert not allows("regex", r"[.]\.", "xx")
    assert not allows("regex", r"(?:x|\x410)", chr(0x410))
    assert allows("regex", r"[\x410]\u00411\x410", "0A1A0")
    assert not allows("regex", "((a){2,})?", "a")
    assert allows("regex", "(?P<year>[0-9]{4})é+😀", "2024éé😀")


@pytest.mark.parametrize(
    ("kind", "guide", "said"),
    [
        ("ebnf_grammar", 'root ::= a{1,40}\na ::= ("x" b){1,40}\nb ::= "y" | root', "multiply to more than 1000"),
        ("ebnf_grammar", 'root ::= x [bc]\nx ::= "a" (= "b")', "lookahead in a grammar is not supported"),
        ("ebnf_grammar", 'root ::= Regex("(?=a)b")', "Regex in a grammar is not supported"),
        ("ebnf_grammar", "root ::= " + "(" * 201 + '"a"' + ")" * 201, "more than 200 nested brackets"),
        ("ebnf_grammar", "root ::= " + "[" * 100_000, "a grammar is not closed"),
        ("ebnf_grammar", 'root ::= "a', "the text or class '\"a' of a grammar is not closed"),
        ("ebnf_grammar", 'root ::= [a\nb ::= "]"', r"the text or class '\[a.*' of a grammar is not closed"),
        ("ebnf_grammar", "\n".join(['root ::= "a"', *(f'r{n} ::= "a"' for n in range(1000))]), "it has 1001 rules"),
        (
            "structural_tag",
            json.dumps(
                {
                    "type": "structural_tag",
                    "format": {"type": "repeat", "min": 0, "max": 10**8, "content": {"type": "any_text"}},
                }
            ),
            "multiply to more than 1000",
        ),
    ],
)
def test_grammars_and_tags_that_could_not_be_followed_are_refused(kind: GuideKind, guide: str, said: str) -> None:
    with pytest.raises(RequestError, match=f"refused: .*{said}"):
        GRAMMARS.compiled(Guide(kind, guide))


def test_grammars_that_only_look_so_are_not() -> None:
    assert allows("ebnf_grammar", 'root ::= "{1,999}"{1,9} | [({1-9]{1,9} | "(" root{1,9} ")"', "({1,999})")
