"""Text format: what protobuf's own library writes is read to the same values, and damage is named by its line."""

from typing import Any

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from trtforge.core.errors import ForgeError
from trtforge.formats.pbtxt import Message, Name, parse

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=40)
INTEGERS = st.integers(0, 2**31 - 1)


@st.composite
def model_configs(draw: st.DrawFn) -> Any:
    """Messages with what a config.pbtxt has: strings, numbers, enumerations, lists, maps, messages in messages."""
    config = model_config_pb2.ModelConfig(name=draw(TEXTS), backend=draw(TEXTS), max_batch_size=draw(INTEGERS))
    config.model_transaction_policy.decoupled = draw(st.booleans())
    config.dynamic_batching.preferred_batch_size.extend(draw(st.lists(INTEGERS, max_size=3)))
    config.dynamic_batching.default_queue_policy.max_queue_size = draw(INTEGERS)
    for name in draw(st.lists(TEXTS, max_size=3)):
        config.input.add(name=name, data_type=model_config_pb2.TYPE_INT32, dims=draw(st.lists(st.integers(-1, 9))))
    for key, value in draw(st.dictionaries(TEXTS, TEXTS, max_size=5)).items():
        config.parameters[key].string_value = value
    return config


@given(model_configs(), st.booleans(), st.booleans())
def test_what_protobuf_writes_is_read(config: Any, short: bool, one_line: bool) -> None:
    text = text_format.MessageToString(config, use_short_repeated_primitives=short, as_one_line=one_line)
    found = parse(text, "config.pbtxt")
    assert found.text("name") == config.name
    assert found.integer("max_batch_size") == config.max_batch_size
    assert [m.flag("decoupled") for m in found.messages("model_transaction_policy")] == [
        config.model_transaction_policy.decoupled
    ]
    (batching,) = found.messages("dynamic_batching")
    assert batching.fields.get("preferred_batch_size", []) == list(config.dynamic_batching.preferred_batch_size)
    inputs = found.messages("input")
    assert [i.text("name") for i in inputs] == [i.name for i in config.input]
    assert [i.fields.get("dims", []) for i in inputs] == [list(i.dims) for i in config.input]
    assert all(i.fields["data_type"] == [Name("TYPE_INT32")] for i in inputs)
    read = {p.text("key"): p.messages("value")[0].text("string_value") for p in found.messages("parameters")}
    assert read == {key: value.string_value for key, value in config.parameters.items()}


@given(st.text(max_size=60))
def test_any_text_is_a_message_or_an_error(text: str) -> None:
    said = "x, line "
    try:
        parse(text, "x")
    except ForgeError as error:
        said = error.message
    assert said.startswith("x, line ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 0x10 b: 010 c: -3 d: 1.5e2f e: .5", {"a": [16], "b": [8], "c": [-3], "d": [150.0], "e": [0.5]}),
        ('a: "x" \'y\' "z\\n\\x41\\101"', {"a": ["xyz\nAA"]}),
        ("a: [1, 2] a: 3; b: [], c: inf", {"a": [1, 2, 3], "b": [], "c": [Name("inf")]}),
        (
            "# nothing\na { b: true }\na: < b: false >",
            {"a": [Message({"b": [Name("true")]}), Message({"b": [Name("false")]})]},
        ),
        ("a [ { b: 1 }, { b: 2 } ]", {"a": [Message({"b": [1]}), Message({"b": [2]})]}),
        ("", {}),
    ],
)
def test_every_form_of_a_value(text: str, expected: dict[str, Any]) -> None:
    assert parse(text, "x").fields == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: 'm'\nmax_batch_size: ${triton_max_batch_size}", r"line 2: expected protobuf text format, found \$"),
        ("a: {\n b: 1", "line 2: expected a field name, found the end"),
        ("a 3", "line 1: expected ':' or '{', found 3"),
        ("a: [1 2]", r"expected ',' or '\]', found 2"),
        ("a: [1,]", "expected a value"),
        ("a: }", "expected a value, found }"),
        ('a: "x', "expected protobuf text format"),
    ],
)
def test_damage_is_named_by_its_line(text: str, said: str) -> None:
    with pytest.raises(ForgeError, match=said) as caught:
        parse(text, "config.pbtxt")
    assert "${placeholder}" in caught.value.hint


def test_what_protobuf_refuses_too_is_refused_by_line() -> None:
    """Not with a traceback of ours: nesting without end, and characters that there are not."""
    with pytest.raises(ForgeError, match=r"line 1: expected at most 100 nested messages"):
        parse("a {" * 2000, "config.pbtxt")
    assert parse('a: "\\U00110000"', "config.pbtxt").text("a") == "\ufffd"
