"""The reader of JSON: limits, and errors that name the file."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.core import json_text
from trtforge.core.errors import AbsentFile, ForgeError
from trtforge.core.json_text import parse_json, read_json, read_json_object

_KEYS = st.text(st.characters(codec="utf-8"), max_size=8)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**39), 10**39) | st.floats(allow_nan=False) | _KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=20,
)


@given(_JSON)
def test_what_json_writes_is_read_alike(value: object) -> None:
    assert parse_json(json.dumps(value), "here", hint="-") == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode(), "here", hint="-") == value


@pytest.mark.parametrize("sign", ["", "-"])
def test_a_sign_is_no_digit(sign: str) -> None:
    assert parse_json(sign + "1" * 40, "here", hint="-") == int(sign + "1" * 40)
    with pytest.raises(ForgeError, match="an integer of 41 digits"):
        parse_json(sign + "1" * 41, "here", hint="-")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    said = "here"
    try:
        parse_json(data, "here", hint="-")
    except ForgeError as error:
        said = error.message
    assert said.startswith("here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n\n", r"x: not JSON: .* \(line 3, column 1\)"),
        ("", "x: not JSON: Expecting value"),
        ("\ufeff{}", "x: not JSON: Unexpected UTF-8 BOM"),
        ("[" * 65 + "]" * 65, "x: nested more than 64 deep"),
        ('{"a":' * 70 + "1" + "}" * 70, "x: nested more than 64 deep"),
        ("[" * 200_000, "x: nested more than 64 deep"),
        ('{"a": 1,\n"b": ' + "1" * 41 + "}", "x, line 2: an integer of 41 digits"),
        ("7" * 10_000, "x, line 1: an integer of 10,000 digits"),
        ('{"a": 1, "b": 2, "a": 3}', "x: the key 'a' occurs twice"),
        ('{"a": "\\ud800"}', "x: a lone surrogate"),
    ],
)
def test_a_defect_is_named(text: str, message: str) -> None:
    with pytest.raises(ForgeError, match=message) as caught:
        parse_json(text, "x", hint="mend it")
    assert caught.value.hint == "mend it"


def test_64_deep_is_read() -> None:
    assert parse_json("[" * 64 + "]" * 64, "x", hint="-") is not None
    assert parse_json("[" + "[], " * 200 + "[]]", "x", hint="-") == [[]] * 201


def test_bytes_that_are_not_utf8_are_named() -> None:
    with pytest.raises(ForgeError, match=r"x: not UTF-8 text \(byte 2\)"):
        parse_json(b'{"\xff": 1}', "x", hint="-")


def test_the_number_of_values_is_limited() -> None:
    assert parse_json("[1, 2, 3]", "x", hint="-", values=4) == [1, 2, 3]
    with pytest.raises(ForgeError, match="x: more than 4 values"):
        parse_json("[1, 2, 3, [], 5]", "x", hint="-", values=4)


def test_repeated_keys_and_halves_are_read_where_they_may_be() -> None:
    assert parse_json('{"a": 1, "a": 2}', "x", hint="-", unique=False) == {"a": 2}
    assert parse_json('"\\ud800"', "x", hint="-", halves=True) == "\ud800"


def test_files_are_read_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("[1, 2]")
    assert read_json(path, hint="-") == [1, 2]
    with pytest.raises(ForgeError, match=r"a\.json: not a JSON object"):
        read_json_object(path, hint="-")
    monkeypatch.setattr(json_text, "MOST_BYTES", 5)
    with pytest.raises(ForgeError, match=r"a\.json: larger than the limit of 5 bytes"):
        read_json(path, hint="-")


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(AbsentFile, match="No such file") as caught:
        read_json(tmp_path / "none", hint="mend", absent="give one")
    assert caught.value.hint == "give one"
    with pytest.raises(ForgeError, match=r"Is a directory|not a regular file"):
        read_json(tmp_path, hint="-")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ForgeError, match="pipe: not a regular file"):
        read_json(tmp_path / "pipe", hint="-")
    with pytest.raises(ForgeError, match="null byte"):
        read_json(Path("a\0b"), hint="-")


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint for a damaged artifact is to delete it."""

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(ForgeError, match=r"x\.json: Permission denied") as caught:
        read_json(tmp_path / "x.json", hint="Delete it.")
    assert caught.value.hint == "Run as a user who may read it."


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e400"])
def test_numbers_that_json_cannot_hold_are_refused_where_they_would_be_written_again(text: str) -> None:
    assert not math.isfinite(parse_json(f"[{text}]", "x", hint="")[0])
    with pytest.raises(ForgeError) as caught:
        parse_json(f'{{"a": [{text}]}}', "the body", hint="", finite=True)
    assert caught.value.message == f"the body: {text} is not a finite number"
    assert parse_json("[1e300, -2.5, 3]", "x", hint="", finite=True) == [1e300, -2.5, 3]
