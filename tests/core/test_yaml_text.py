"""The reader of YAML: JSON's types, limits, and errors that name the file and the line."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trtforge.core.errors import AbsentFile, ForgeError
from trtforge.core.yaml_text import MOST_BYTES, parse_yaml, read_yaml

_KEYS = st.text(st.characters(categories=("L", "N")), max_size=8)
_YAML = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | _KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=20,
)


def read(text: str) -> object:
    return parse_yaml(text, "x.yaml", "mend it")


@given(_YAML)
def test_what_yaml_writes_is_read_alike(value: object) -> None:
    assert read(yaml.safe_dump(value)) == value


@given(st.text(max_size=100))
def test_any_text_is_a_value_or_an_error(text: str) -> None:
    said = "x.yaml"
    try:
        read(text)
    except ForgeError as error:
        said = error.message
    assert said.startswith("x.yaml")


def test_values_are_those_of_json() -> None:
    text = "a: 2024-01-01\nb: 1.2.1\nc: [1, 0.5, true, null, x]\nd: &d {e: 1}\nf: *d\ng: {<<: *d, h: 2}\n"
    assert read(text) == {
        "a": "2024-01-01",
        "b": "1.2.1",
        "c": [1, 0.5, True, None, "x"],
        "d": {"e": 1},
        "f": {"e": 1},
        "g": {"e": 1, "h": 2},
    }
    assert read("") is None


def test_a_merged_mapping_may_itself_replace_merged_keys() -> None:
    text = "a:\n  b: &b\n    <<: &c {samples: 64, tokens: 512}\n    samples: 8\nd: {<<: *b}\ne: {<<: [*b, *c]}\n"
    found = read(text)
    assert isinstance(found, dict)
    assert found["a"]["b"] == found["d"] == {"samples": 8, "tokens": 512}
    assert set(found["e"]) == {"samples", "tokens"}
    assert read('a: {"<<": 1, <<: {b: 2}}') == {"a": {"<<": 1, "b": 2}}


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [\n", "x.yaml, line 2: not YAML: "),
        ("a: 1\nb: !!int abc\n", "x.yaml, line 2: not YAML: 'abc' is not of type !!int"),
        ("a: !!float abc", "'abc' is not of type !!float"),
        ("a: !!bool abc", "'abc' is not of type !!bool"),
        ("a: !!timestamp 2024-01-01", "values of type !!timestamp are not supported"),
        ("a: !!binary aGk=", "values of type !!binary are not supported"),
        ("a: !!python/object:os.system x", "values of type !!python/object:os.system are not supported"),
        ("a: !mine x", "values of type !mine are not supported"),
        ("a: " + "9" * 5000, "x.yaml, line 1: not YAML: a number of 5,000 characters"),
        ("1: a", "the key '1' is not text: put it in quotes"),
        ("null: a", "the key 'null' is not text"),
        ("[a, b]: c", "is not text"),
        ("a: 1\nb: 2\na: 3\n", "x.yaml, line 3: not YAML: the key a occurs twice"),
        ("a: {<<: {b: 1, b: 2}}", "x.yaml, line 1: not YAML: the key b occurs twice"),
        ("a: {<<: [{c: 1}, {b: 1, b: 2}]}", "the key b occurs twice"),
        ("a: &a {b: 1}\nc:\n  <<: *a\n  <<: *a\n", "x.yaml, line 4: not YAML: the key << occurs twice"),
        ("a: {<<: {1: 2}}", "the key '1' is not text: put it in quotes"),
        ("a: {!!merge {b: 1}: {c: 2}}", "the key a mapping or sequence is not text"),
        ("a: {<<: 3}", "expected a mapping or list of mappings for merging"),
        ("a: &a [*a]", "an alias inside its own anchor"),
        ("a: *b", "found undefined alias"),
        ("a: " + "[" * 100, "nested more than 32 deep"),
        ("- " * 5000 + "a", "nested more than 32 deep"),
        (BOMB, "more than 50,000 values after expanding aliases"),
        ('a: "\\U00110000"', "x.yaml: not YAML: "),
        ("a: \x07", "x.yaml: not YAML: "),
    ],
)
def test_a_defect_is_named(text: str, message: str) -> None:
    with pytest.raises(ForgeError) as caught:
        read(text)
    assert message in caught.value.message
    assert caught.value.hint == "mend it"


def test_files_are_read_up_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("# " + "x" * MOST_BYTES)
    with pytest.raises(ForgeError, match=r"a\.yaml: larger than the limit of 262,144 bytes"):
        read_yaml(path, hint="-")
    path.write_bytes(b"a: \xff")
    with pytest.raises(ForgeError, match=r"a\.yaml: not UTF-8 text \(byte 3\)"):
        read_yaml(path, hint="-")
    with pytest.raises(AbsentFile):
        read_yaml(tmp_path / "none", hint="-")
