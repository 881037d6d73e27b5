"""JSON bodies: what is refused, with which words, and that nothing else is."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.serve.front.json_body import parse_object
from trtforge.serve.front.limits import FrontLimits
from trtforge.serve.front.refusal import Refusal

LIMITS = FrontLimits()
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5), st.booleans())
def test_objects_within_the_limits_come_through(document: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(document, ensure_ascii=ascii_only)
    assert parse_object(text.encode("utf-8", errors="strict"), LIMITS) == document


@given(st.binary(max_size=300))
def test_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    try:
        document = parse_object(body, LIMITS)
    except Refusal:
        return
    assert document == json.loads(body)


@given(st.text(alphabet='[]{}",:\\ aux1', max_size=200))
def test_any_text_of_json_signs_is_judged_as_json_does(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    try:
        document = parse_object(text.encode(), LIMITS)
    except Refusal:
        if isinstance(expected, dict):
            names: list[str] = []
            json.loads(text, object_pairs_hook=lambda pairs: names.append("x") or _note(pairs, names))
            assert "twice" in names
    else:
        assert document == expected


def _note(pairs: list[tuple[str, Any]], names: list[str]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        names.append("twice")
    return dict(pairs)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is not JSON: Expecting value at line 1 column 1"),
        (b"[]", "the body must be a JSON object, not an array"),
        (b"null", "the body must be a JSON object, not null"),
        (b'"a"', "the body must be a JSON object, not a string"),
        (b'{"a":"\xff"}', "the body is not valid UTF-8: byte 0xff at offset 6"),
        (b'{"a":"\xed\xa0\x80"}', "the body is not valid UTF-8: byte 0xed at offset 6"),
        (b'\xef\xbb\xbf{"a":1}', "the body is not JSON"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":-Infinity}', "-Infinity is not JSON"),
        (b'{"a":1e999}', "the number 1e999 is out of range"),
        (b'{"a":' + b"1" * 41 + b"}", "a number has 41 characters, at most 40 are accepted"),
        (b'{"a":1,"a":2}', "the name 'a' is given twice"),
        (b'{"a":{"b\\n":1,"b\\n":2}}', "the name 'b?' is given twice"),
        (b'{"a":"\\ud800"}', "half a surrogate pair"),
        (b'{"a":' + b"[" * 32 + b"]" * 32 + b"}", "nested deeper than 32 levels"),
        (b"[" * 200_000, "more than 16384 arrays and objects"),
        (b'{"a":[' + b"{}," * 20_000 + b"{}]}", "more than 16384 arrays and objects"),
        (b'{"a":1', "Expecting ',' delimiter"),
        (b'{"a":1}x', "Extra data"),
    ],
)
def test_what_is_wrong_is_named(body: bytes, said: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse_object(body, LIMITS)
    assert caught.value.status == 400
    assert said in caught.value.message


def test_brackets_in_strings_are_no_nesting() -> None:
    text = "[" * 100_000 + '"' + "\\" + "{"
    assert parse_object(json.dumps({"text_input": text}).encode(), LIMITS) == {"text_input": text}


def test_a_body_of_the_limit_is_accepted_and_a_longer_one_is_too_large() -> None:
    body = b'{"a":"' + b"x" * (LIMITS.json_bytes - 8) + b'"}'
    assert len(body) == LIMITS.json_bytes
    assert len(parse_object(body, LIMITS)["a"]) == LIMITS.json_bytes - 8
    with pytest.raises(Refusal) as caught:
        parse_object(body + b" ", LIMITS)
    assert caught.value.status == 413
