"""Calls in the forms that the chat templates of other models teach, and arguments that stand between tags."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageToolCall

from tests.gateway.fake import FakeBackend
from tests.gateway.support import running
from tests.gateway.test_tools import AUTO, USER, streams_as_a_whole
from trtforge.core.harmony import CALL_HEAD
from trtforge.core.json_schema import type_of
from trtforge.gateway import argument_types
from trtforge.gateway.call_output import CallDelta
from trtforge.gateway.chat import read_chat
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.sequence import Delta
from trtforge.gateway.tool_calls import StreamedCalls, ToolCall, split
from trtforge.gateway.tools import ToolUse

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "most": {"type": ["number", "null"]},
        "unit": {"enum": ["C", "F", None]},
        "places": {"type": "array", "items": {"type": "string"}},
        "at": {"anyOf": [{"type": "string"}, {"type": "object"}]},
        "wind": {"type": "boolean"},
        "kind": {"$ref": "#/$defs/Kind"},
        "code": {"const": "7"},
        "place": {"$ref": "#/$defs/Place"},
        "text": {"type": "string", "anyOf": [{"minLength": 1}, {"pattern": "x"}]},
        "both": {"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]},
        "lost": {"$ref": "#/$defs/Nowhere"},
        "none": {"enum": []},
        "loop": {"$ref": "#/properties/loop"},
        "many": {"$ref": "#/$defs/Many"},
        "listed": {"$ref": "#/$defs/a~1b%20c/oneOf/0"},
        "open": {"type": "object"},
        "any": {"type": ["object", "array", "null"]},
        "str": {"type": "str"},
        "int": {"type": ["int", "str"]},
        "float": {"anyOf": [{"type": "float"}, {"type": "str"}]},
        "bool": {"type": "bool"},
        "dict": {"type": ["dict", "str"]},
        "list": {"type": ["list", "str"]},
    },
    "allOf": [{"$ref": "#/$defs/More"}, {"$ref": "#/$defs/More"}],
    "$defs": {
        "Place": {"type": "string"},
        "Kind": {"oneOf": [{"enum": ["rain", " sun"]}, {"$ref": "#/$defs/Kind"}]},
        "Many": {"anyOf": [{"$ref": "#/$defs/Many"}] * 30},
        "More": {"properties": {"more": {"type": "string"}}, "allOf": [{"$ref": "#/$defs/More"}] * 30},
        "a/b c": {"oneOf": [{"type": "string"}]},
    },
}
USE = ToolUse("auto", AUTO.names, True, {"weather": WEATHER, "time": {}})
CODER = """<tool_call>
<function=weather>
<parameter=city>
Rome
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>"""
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Rome", "days": 3}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n"
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome", "days": 3}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
MINIMAX = """<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Rome</parameter>
<parameter name="days">3</parameter>
</invoke>
<invoke name="time">
</invoke>
</minimax:tool_call>"""
PHI = '<|tool_call|>{"name": "weather", "arguments": {"city": "Rome", "days": 3}}<|/tool_call|>'
NEMOTRON = (
    '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rome", "days": 3}}, {"name": "time", "arguments": {}}]'
    "</TOOLCALL>"
)
APRIEL = NEMOTRON.replace("TOOLCALL", "tool_calls")
GRANITE = '<function_call> {"name": "weather", "arguments": {"city": "Rome", "days": 3}}'
SEED = f"""<seed:tool_call>
{CODER.removeprefix("<tool_call>").removesuffix("</tool_call>").strip()}
<function=time>
</function>
</seed:tool_call>"""
LLAMA = '<function=weather>{"city": "Rome", "days": 3}</function>'
MISTRAL = 'weather{"city": "Rome", "days": 3}'
ARGS = 'weather[CALL_ID]ABCdef123[ARGS]{"city": "Rome", "days": 3}'
ROME_JSON = '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}'
TIME_JSON = '{"name": "time", "arguments": {}}'
RAIN_JSON = TIME_JSON.replace("time", "rain")
REORDERED, WITH_ID = '{"arguments": {}, "name": "time"}', '{"id": "x", "name": "time", "arguments": {}}'


def array(*elements: str) -> str:
    """An array between Hermes's tags."""
    return f"<tool_call>[{', '.join(elements)}]</tool_call>"


OSS = "<|channel|>commentary to=functions.weather<|message|>"
ROME = ToolCall("weather", '{"city": "Rome", "days": 3}')
TIME = ToolCall("time", "{}")


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (CODER, "", [ROME]),
        (f"I ask.\n\n{CODER}\n{CODER}", "I ask.", [ROME, ROME]),
        (CODER.removeprefix("<tool_call>\n"), "", [ROME]),
        (CODER.replace("\n", ""), "", [ROME]),
        (CODER.removesuffix("\n</function>\n</tool_call>"), "", [ROME]),
        (CODER.removesuffix("\n</parameter>\n</function>\n</tool_call>"), "", [ROME]),
        (CODER.replace("</function>\n", ""), "", [ROME]),
        (f"{CODER} Wait.", " Wait.", [ROME]),
        (CODER.replace("Rome\n</parameter>", "Rome"), "", [ROME]),
        (CODER.replace("3\n</parameter>", "3"), "", [ROME]),
        (CODER.partition("rameter>\n<parameter=days")[0], "", [ToolCall("weather", '{"city": "Rome"}')]),
        ("<tool_call>\n<function=time>\n</function>\n</tool_call>", "", [TIME]),
        (CODER.replace("weather", "rain"), CODER.replace("weather", "rain"), []),
        (GLM, "", [ROME]),
        (GLM.replace("\n", ""), "", [ROME]),
        ("<tool_call>time</tool_call>", "", [TIME]),
        ("<tool_call>time\n</tool_call>\n<tool_call>time\n</tool_call>", "", [TIME, TIME]),
        ("<tool_call>rain\n</tool_call>", "<tool_call>rain\n</tool_call>", []),
        (DEEPSEEK, "", [ROME, TIME]),
        (f"So:{DEEPSEEK}", "So:", [ROME, TIME]),
        (DEEPSEEK_31, "", [ROME, TIME]),
        (DEEPSEEK_31.replace(">weather", ">rain"), DEEPSEEK_31[:59].replace("weather", "rain"), [TIME]),
        (f"<think>I may {CODER}.</think>\n\n{CODER}", f"<think>I may {CODER}.</think>", [ROME]),
        (f"\n<think>{GLM}", "\n<think>", [ROME]),
        (f"<think></think>{MISTRAL}", "<think></think>", [ROME]),
        ('<think>So:</think>\n{"name": "time", "parameters": {}}', "<think>So:</think>", [TIME]),
        (f"<think {GLM}", "<think", [ROME]),
        (LLAMA, "", [ROME]),
        (f"{LLAMA}{LLAMA}", "", [ROME, ROME]),
        (MISTRAL, "", [ROME]),
        (f"{MISTRAL}time{{}}", "", [ROME, TIME]),
        (f"[TOOL_CALLS]{MISTRAL}[TOOL_CALLS]time{{}}", "", [ROME, TIME]),
        (f"I ask.[TOOL_CALLS]{ARGS}[TOOL_CALLS]time[CALL_ID]bcdefghij[ARGS]{{}} So.", "I ask. So.", [ROME, TIME]),
        (f"I ask.[TOOL_CALLS] {NEMOTRON[10:-11]}", "I ask.", [ROME, TIME]),
        (f"[TOOL_CALLS]{NEMOTRON[10:-11]}\nSo.", "\nSo.", [ROME, TIME]),
        ('So:[TOOL_CALLS] [{"arguments": {}, "id": "a", "name": "time"}]', "So:", [TIME]),
        (f'[TOOL_CALLS][{{"name": "time", "arguments": {{}}, "id": "a"}}, {RAIN_JSON}]', RAIN_JSON, [TIME]),
        ("[TOOL_CALLS]rain{} [TOOL", "[TOOL_CALLS]rain{} [TOOL", []),
        (f"{MISTRAL} it is.", " it is.", [ROME]),
        ("weather {it is}", "weather {it is}", []),
        ("weather{x} is it", "weather{x} is it", []),
        ("weather{", "weather{", []),
        (f'{OSS}{{"city": "Rome", "days": 3}}<|call|>', "", [ROME]),
        (f'{OSS}{{"city": "R<|call|> So.', " So.", [ToolCall("weather", '{"city": "R', complete=False)]),
        (KIMI, "", [ROME, TIME]),
        (f"So:{KIMI} Wait.", "So: Wait.", [ROME, TIME]),
        (KIMI.replace("functions.weather:0", " weather: 12 "), "", [ROME, TIME]),
        (KIMI.partition("<|tool_call_end|>")[0], "", [ROME]),
        (MINIMAX, "", [ROME, TIME]),
        (MINIMAX.replace("\n", ""), "", [ROME, TIME]),
        (MINIMAX.removeprefix("<minimax:tool_call>\n"), "", [ROME, TIME]),
        (f"<think>So.</think>\n\nI ask.\n{MINIMAX}", "<think>So.</think>\n\nI ask.", [ROME, TIME]),
        ('An <invoke name="x"> or <invoke name="weather" b', 'An <invoke name="x"> or <invoke name="weather" b', []),
        (PHI, "", [ROME]),
        (f"{PHI}{PHI} Wait.", " Wait.", [ROME, ROME]),
        (PHI.replace("{", "[{", 1).replace("}<", "}]<"), "", [ROME]),
        (PHI.replace("{", "[{", 1).replace("}<|/tool_call|>", "}] So."), " So.", [ROME]),
        ('<|tool_call|>{"arguments": {}, "name": "time"}<|/tool_call|>', "", [TIME]),
        (NEMOTRON, "", [ROME, TIME]),
        (f"So: {NEMOTRON}", "So:", [ROME, TIME]),
        (NEMOTRON.replace('"time"', '"rain"') + " So.", f"{RAIN_JSON} So.", [ROME]),
        (APRIEL, "", [ROME, TIME]),
        (f"I ask.\n{APRIEL} So.", "I ask.\n So.", [ROME, TIME]),
        (f"<tool_calls>{ROME_JSON}</tool_calls>", "", [ROME]),
        (f"<tool_calls>[{REORDERED}]</tool_calls>", "", [TIME]),
        (GRANITE, "", [ROME]),
        (f"{GRANITE} {GRANITE.replace(ROME_JSON, TIME_JSON)}", "", [ROME, TIME]),
        (f"So: {GRANITE}</function_call>", "So:", [ROME]),
        (f"<function_call> {RAIN_JSON}", f"<function_call> {RAIN_JSON}", []),
        (SEED, "", [ROME, TIME]),
        (f"So:\n{SEED}\n", "So:", [ROME, TIME]),
        (SEED.replace("\n", ""), "", [ROME, TIME]),
        ("A <seed:tool_call> or <seed:tool_call>\n<b>", "A <seed:tool_call> or <seed:tool_call>\n<b>", []),
        (f"{array(ROME_JSON, REORDERED)} So.", " So.", [ROME, TIME]),
        (f"{array(ROME_JSON, WITH_ID, TIME_JSON)} So.", " So.", [ROME, TIME, TIME]),
        (array(ROME_JSON, RAIN_JSON, TIME_JSON), RAIN_JSON, [ROME, TIME]),
        (array(ROME_JSON, '{"x": "</tool_call>]}"}', TIME_JSON), '{"x": "</tool_call>]}"}', [ROME, TIME]),
        (array(ROME_JSON + TIME_JSON), "", [ROME, TIME]),
        (array(ROME_JSON, "3") + " So.", ", 3]</tool_call> So.", [ROME]),
        (
            array(ROME_JSON, '{"x": ' + "[1]," * 300 + "1}", TIME_JSON),
            '{"x": ' + "[1]," * 300 + "1}",
            [ROME, TIME],
        ),
        (array(RAIN_JSON, ROME_JSON), array(RAIN_JSON, ROME_JSON), []),
        (f"<tool_call>[{ROME_JSON}\n\nIt is noon. {LLAMA}", "\n\nIt is noon.", [ROME, ROME]),
        (f"<|tool_call|>[{ROME_JSON}, {RAIN_JSON}] So.", f"{RAIN_JSON} So.", [ROME]),
        (f"[{ROME_JSON}, {REORDERED}, {RAIN_JSON}] So.", "", [ROME, TIME]),
        (
            '<|tool_call|>[{"type": "function", "function": {"name": "time", "arguments": {}}}]<|/tool_call|>',
            "",
            [TIME],
        ),
        ("<TOOLCALL>[" * 30 + TIME_JSON, "<TOOLCALL>[" * 29, [TIME]),
        ("<TOOLCALL>[" * 30 + REORDERED + "]</TOOLCALL>", "<TOOLCALL>[" * 30 + REORDERED + "]</TOOLCALL>", []),
        (
            NEMOTRON.replace("weather", "rain").partition(", {")[0],
            NEMOTRON.replace("weather", "rain").partition(", {")[0],
            [],
        ),
        (
            f"[THINK]I may [TOOL_CALLS]{ARGS}.[/THINK][TOOL_CALLS]{ARGS}",
            f"[THINK]I may [TOOL_CALLS]{ARGS}.[/THINK]",
            [ROME],
        ),
        ("weath", "weath", []),
        ("A <function= or <function=rain> b", "A <function= or <function=rain> b", []),
    ],
)
def test_calls_in_the_forms_of_other_models(text: str, rest: str, calls: Sequence[ToolCall]) -> None:
    if "rain<｜" in text:
        rest = text[: text.index("<｜tool▁call▁begin｜>time")]
    assert split(USE, text, "stop") == (rest, calls)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("city", "5", "5"),
        ("city", "null", "null"),
        ("city", '"Rome"\t\\ ü', '"Rome"\t\\ ü'),
        ("city", "\n  Rome\n\n", "\n  Rome\n\n"),
        ("city", "", ""),
        ("city", "<b></b>", "<b></b>"),
        ("days", " 5 ", 5),
        ("days", "five", "five"),
        ("days", "[5", "[5"),
        ("most", "1.5e3", 1500.0),
        ("most", "5", 5),
        ("most", "None", None),
        ("unit", "C", "C"),
        ("unit", "null", None),
        ("unit", '"C"', '"C"'),
        ("places", '["a",\n "b"]', ["a", "b"]),
        ("at", '{"x": 1}', {"x": 1}),
        ("at", "5", "5"),
        ("at", "{noon}", "{noon}"),
        ("wind", "True", True),
        ("wind", "false", False),
        ("wind", "TRUE", True),
        ("wind", " fAlse ", False),
        ("days", "TRUE", "TRUE"),
        ("other", "TRUE", "TRUE"),
        ("open", "{'a': True, 'b': [None, 1.5, -2]}", {"a": True, "b": [None, 1.5, -2]}),
        ("open", "{'a': 'ü\\d'}", {"a": "ü\\d"}),
        ("open", "{1: 'a'}", {"1": "a"}),
        ("open", "{1: 'a', '1': 'b'}", "{1: 'a', '1': 'b'}"),
        ("open", "{'a': 1e999}", "{'a': 1e999}"),
        ("open", "{'a': 1j}", "{'a': 1j}"),
        ("open", "{'a', 'b'}", "{'a', 'b'}"),
        ("open", "{[]: 1}", "{[]: 1}"),
        ("open", "{'a': b'c'}", "{'a': b'c'}"),
        ("open", "{'a': '\\ud800'}", "{'a': '\\ud800'}"),
        ("open", f"{{'a': {'9' * 41}}}", f"{{'a': {'9' * 41}}}"),
        ("open", "{'a': open('/')}", "{'a': open('/')}"),
        ("open", "{'a': " + "-" * 30000 + "1}", "{'a': " + "-" * 30000 + "1}"),
        ("open", "{'a': " + "1+" * 15000 + "1}", "{'a': " + "1+" * 15000 + "1}"),
        ("open", "{'a': " + "[" * 70 + "]" * 70 + "}", "{'a': " + "[" * 70 + "]" * 70 + "}"),
        ("open", "{'a': '" + "b" * 32760 + "'}", "{'a': '" + "b" * 32760 + "'}"),
        ("places", "['a', \"b\",]", ["a", "b"]),
        ("places", "('a',)", ["a"]),
        ("places", "('a')", "('a')"),
        ("places", "['a'", "['a'"),
        ("any", "['a']", ["a"]),
        ("any", "'a'", "'a'"),
        ("at", "{'x': 1}", "{'x': 1}"),
        ("other", "['x']", "['x']"),
        ("code", "7", "7"),
        ("code", " 7 ", "7"),
        ("unit", "C ", "C"),
        ("unit", "c ", "c "),
        ("kind", "rain", "rain"),
        ("kind", "\n rain\n", "rain"),
        ("kind", " sun", " sun"),
        ("kind", "snow ", "snow "),
        ("place", "7", "7"),
        ("text", "7", "7"),
        ("both", "7", "7"),
        ("lost", "7", 7),
        ("none", "7", 7),
        ("loop", "7", 7),
        ("many", "7", 7),
        ("listed", "7", "7"),
        ("more", "7", "7"),
        ("str", "01234", "01234"),
        ("str", "7", "7"),
        ("int", "7", 7),
        ("int", "7.5", "7.5"),
        ("float", "7", 7),
        ("float", "true", "true"),
        ("bool", "true", True),
        ("dict", '{"x": 1}', {"x": 1}),
        ("dict", "[1]", "[1]"),
        ("list", "[1]", [1]),
        ("list", '{"x": 1}', '{"x": 1}'),
        ("other", "7", 7),
        ("other", '"7"', "7"),
        ("other", "seven", "seven"),
        ("other", "[NaN]", "[NaN]"),
        ('od"d', "a", "a"),
    ],
)
def test_arguments_have_the_types_of_their_schema(name: str, text: str, value: object) -> None:
    coder = f"<function=weather>\n<parameter={name}>\n{text}\n</parameter>\n</function>"
    glm = f"<tool_call>weather\n<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    for written in (coder, glm):
        (call,) = split(USE, written, "stop")[1]
        assert call.complete
        assert json.loads(call.arguments) == {name: value}


def test_other_arguments_have_the_type_that_the_schema_says_of_them() -> None:
    written = "<function=weather><parameter=a>7</parameter></function>"
    for schema in ({"additionalProperties": {"type": "string"}}, {"$ref": "#/$defs/All", "$defs": {"All": WEATHER}}):
        (call,) = split(
            ToolUse("auto", ("weather",), True, {"weather": schema}), written.replace("=a", "=city"), "stop"
        )[1]
        assert call.arguments == '{"city": "7"}'
    for odd in ({"properties": None}, {"properties": {"a": True}}, {"additionalProperties": False}, {"$ref": "#Foo"}):
        (call,) = split(ToolUse("auto", ("weather",), True, {"weather": odd}), written, "stop")[1]
        assert call.arguments == '{"a": 7}'


def test_a_schema_is_read_once_for_all_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[object]()
    monkeypatch.setattr(argument_types, "_type", lambda value: found.append(value) or type_of(value))
    places = {"$ref": "#/$defs/Place"}
    schema = {
        "properties": {f"a{number}": places for number in range(20)},
        "additionalProperties": {"anyOf": [places, {"enum": [0]}]},
        "$defs": {"Place": {"enum": [f"place {number}" for number in range(500)]}},
    }
    use = ToolUse("auto", ("weather",), True, {"weather": schema})
    for _ in range(2):  # sequences of one request
        values = "".join(f"<parameter=a{number}> place 7</parameter>" for number in range(40))
        (call,) = split(use, f"<function=weather>{values}</function>", "stop")[1]
        assert json.loads(call.arguments) == {f"a{number}": "place 7" for number in range(40)}
    assert len(found) == 501


def test_a_long_chain_of_references_says_nothing() -> None:
    chain = {f"D{number}": {"$ref": f"#/$defs/D{number + 1}"} for number in range(3000)}
    schema = {"properties": {"a": {"$ref": "#/$defs/D0"}}, "$defs": {**chain, "D3000": {"enum": ["7"]}}}
    use = ToolUse("auto", ("weather",), True, {"weather": schema})
    (call,) = split(use, "<function=weather><parameter=a>7</parameter></function>", "stop")[1]
    assert call.arguments == '{"a": 7}'


def test_a_mention_of_a_tag_is_held_back_no_longer_than_it_may_be_a_call() -> None:
    for mark in (
        "<TOOLCALL>",
        "<|tool_call|>",
        "<tool_call>",
        "<tool_calls>",
        "<function_call>",
        "<minimax:tool_call>",
        "<seed:tool_call>",
        "<|tool_call_begin|>",
        "[TOOL_CALLS]",
    ):
        streamed = StreamedCalls(USE)
        told = [*streamed.take(Delta(0, f"Write {mark} a"))[1], *streamed.take(Delta(0, "nd b"))[1]]
        assert "".join(map(str, told)) == f"Write {mark} and b", mark
    streamed = StreamedCalls(USE)
    pieces = ["Write <function=wea", "ther>", " in", " it", " <function=rain", "> then"]
    assert ["".join(str(each) for each in streamed.take(Delta(0, piece))[1]) for piece in pieces] == [
        "Write",
        "",
        " <function=weather> in",
        " it",
        " <function=rain",
        "> then",
    ]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (CODER.removesuffix("me\n</parameter>" + CODER.partition("me\n</parameter>")[2]), '{"city": "Ro'),
        (CODER.partition("\n<parameter=days")[0], '{"city": "Rome"'),
        (CODER.partition("\n</parameter>\n</function>")[0], '{"city": "Rome", "days": '),
        (CODER.partition("</function>")[0], '{"city": "Rome", "days": 3'),
        (GLM.partition("me</arg_value>")[0], '{"city": "Ro'),
    ],
)
def test_a_call_that_max_tokens_cut_is_not_complete(text: str, arguments: str) -> None:
    assert split(USE, text, "length") == ("", [ToolCall("weather", arguments, complete=False)])


def test_strings_come_as_they_are_written_and_other_arguments_whole() -> None:
    streamed = StreamedCalls(USE)
    pieces = ["<tool_call>\n<function=weather>\n", "<parameter=city>\nRo", 'me "a', '"\n', "\n</para", "meter>\n"]
    pieces += ["<parameter=days>\n1", "2\n</parameter>", "\n</function>\n", "</tool_call>"]
    told = [streamed.take(Delta(0, piece))[1] for piece in pieces]
    told.append(streamed.take(Delta(0, "", "stop"))[1])
    assert [each for each in told if each] == [
        [CallDelta(0, '{"city": "Ro', "weather")],
        [CallDelta(0, 'me \\"a')],
        [CallDelta(0, '\\"')],
        [CallDelta(0, "\\n")],
        [CallDelta(0, '"')],
        [CallDelta(0, ', "days": ')],
        [CallDelta(0, "12")],
        [CallDelta(0, "}", last=True)],
    ]


PARTS = [CODER, GLM, DEEPSEEK, DEEPSEEK_31, LLAMA, MISTRAL, "So:", "\n", " ", "<", "</", "weather", "time", "{}", "}"]
PARTS += ["<tool_call>", "</tool_call>", "<function=weather>", "<function=", "</function>", "<parameter=city>\n"]
PARTS += ["<parameter=days>", "<parameter=", "\n</parameter>", "</parameter>", "Rome", "3", '"', "\\", " " * 500]
PARTS += ["<arg_key>city</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```"]
PARTS += [
    "<think>",
    "<thi",
    "</think>",
    "</th",
    "[THINK]",
    "[/THINK]",
    KIMI,
    MINIMAX,
    PHI,
    NEMOTRON,
    APRIEL,
    GRANITE,
    SEED,
    "<function_call>",
    "</seed:tool_call>",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "]",
    ",",
]
PARTS += ["<|tool_call|>[", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", '<invoke name="', 'weather">', "[{"]
PARTS += [
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    ARGS,
    array(ROME_JSON, REORDERED),
    array(ROME_JSON, RAIN_JSON),
    WITH_ID,
]


@given(
    use=st.sampled_from([USE, ToolUse("auto", USE.names, False, USE.schemas)]),
    parts=st.lists(st.sampled_from(PARTS), max_size=9),
    sizes=st.lists(st.sampled_from([1, 3, 40, 200]), min_size=1, max_size=9),
    reason=st.sampled_from(["stop", "length"]),
)
@example(use=USE, parts=[CODER, "\n", GLM], sizes=[1] * 200, reason="stop")
@example(use=USE, parts=["\n", "<think>", GLM, "</th", "</think>", "\n", GLM], sizes=[1] * 200, reason="stop")
def test_a_stream_has_the_text_and_the_calls_of_the_whole_answer(
    use: ToolUse, parts: list[str], sizes: list[int], reason: str
) -> None:
    text = "".join(parts)
    calls = streams_as_a_whole(use, text, sizes, reason)
    for call in calls:
        if call.complete and "```" not in text and "{" not in call.arguments[1:]:
            assert isinstance(json.loads(call.arguments), dict)


def test_the_schemas_of_the_tools_reach_the_reader() -> None:
    tools: list[Mapping[str, Any]] = [
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "time"}},
    ]
    asked = {"model": "m", "messages": [USER], "tools": tools}
    use = read_chat(asked, GatewayLimits()).structure.use
    assert use is not None
    assert use.schemas["weather"]["properties"] == WEATHER["properties"]
    (call,) = split(use, CODER.replace("Rome", "5"), "stop")[1]
    assert call.arguments == '{"city": "5", "days": 3}'


@contextmanager
def asked(words: str) -> Iterator[tuple[openai.OpenAI, Sequence[Any]]]:
    """OpenAI's client of a model that says these words, and the choice of a chat with a tool: whole, and streamed."""
    backend = FakeBackend(words=tuple(words[start : start + 3] for start in range(0, len(words), 3)))
    given: Any = {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
    }
    with running([backend]) as gateway:
        client = openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0)
        whole = client.chat.completions.create(model="ensemble", **given)
        with client.chat.completions.stream(model="ensemble", **given) as stream:
            yield client, (whole.choices[0], stream.get_final_completion().choices[0])


def check_call(choice: Any, content: str | None) -> None:
    assert (choice.message.content or None, choice.finish_reason) == (content, "tool_calls")
    (call,) = choice.message.tool_calls
    assert isinstance(call, ChatCompletionMessageToolCall)
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome", "days": 3})


def test_openais_client_reads_a_call_between_tags() -> None:
    with asked(CODER) as (_, choices):
        for choice in choices:
            check_call(choice, None)


def test_openais_client_reads_the_channels_of_gpt_oss() -> None:
    words = (
        "<|channel|>analysis<|message|>I must ask.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Rome", "days": 3}'
    )
    tools: Any = [{"type": "function", "name": "weather", "strict": False, "parameters": WEATHER}]
    with asked(words) as (client, choices):
        for choice in choices:
            check_call(choice, "Let me see.")
        assert choices[0].message.model_extra["reasoning_content"] == "I must ask."
        response = client.responses.create(model="ensemble", input="Rome?", tools=tools, reasoning={"effort": "low"})
        plain = client.completions.create(model="ensemble", prompt="a", max_tokens=500).choices[0]
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "Let me see."
    assert response.reasoning is not None
    assert response.reasoning.effort == "low"
    assert plain.text == words


def test_items_of_a_response_have_the_order_of_the_channels() -> None:
    thinks = "<|channel|>analysis<|message|>I must ask.<|end|><|start|>assistant"
    call = OSS.replace("<|message|>", " <|constrain|>json<|message|>") + '{"city": "Rome"}<|call|><|start|>assistant'
    words = f"{thinks}{call}{thinks}<|channel|>commentary<|message|>Again.<|end|><|start|>assistant{thinks}{call}"
    tools: Any = [{"type": "function", "name": "weather", "strict": False, "parameters": WEATHER}]
    with asked(words) as (client, _):
        whole = client.responses.create(model="ensemble", input="Rome?", tools=tools)
        with client.responses.stream(model="ensemble", input="Rome?", tools=tools) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        unknown = client.responses.create(model="ensemble", input="Rome?")
        chat: Any = {
            "model": "ensemble",
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "time"}}],
        }
        other = client.chat.completions.create(**chat).choices[0]
        with client.chat.completions.stream(**chat) as chunks:
            parts = chunks.get_final_completion().choices[0]
    kinds = ["reasoning", "function_call", "reasoning", "message", "reasoning", "function_call"]
    assert [item.type for item in whole.output] == [item.type for item in streamed.output] == kinds
    assert [item.content[0].text for item in whole.output if item.type == "reasoning" and item.content] == [
        "I must ask."
    ] * 3
    assert whole.output_text == streamed.output_text == "Again."
    for ended in ("response.output_item.added", "response.output_item.done"):
        assert [(each.output_index, each.item.type) for each in events if each.type == ended] == [*enumerate(kinds)]
    written = f'{OSS}{{"city": "Rome"}}<|call|>'
    assert unknown.output_text == f"{written}Again.{written}"
    for choice in (other, parts):
        assert (choice.message.content, choice.finish_reason) == (f"{written}Again.{written}", "stop")
        assert choice.message.model_extra == {"reasoning_content": "I must ask.\nI must ask.\nI must ask."}


def test_a_call_of_gpt_oss_names_its_function_alone() -> None:
    words = '<|channel|>commentary to=weather <|constrain|>json<|message|>{"city": "Rome", "days": 3}<|call|>'
    with asked(words) as (_, choices):
        for choice in choices:
            check_call(choice, None)


def test_a_call_of_gpt_oss_of_an_unknown_function_is_not_held_back() -> None:
    streamed = StreamedCalls(USE)
    pieces = [CALL_HEAD, "we", 'ek<|message|>{"ci', 'ty": 1}']
    told = ["".join(map(str, streamed.take(Delta(0, piece))[1])) for piece in pieces]
    assert told == ["", "", f'{CALL_HEAD}week<|message|>{{"ci', 'ty": 1}']
