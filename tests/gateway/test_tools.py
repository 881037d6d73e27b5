"""JSON formats and calls of functions: the guide that is asked for, and OpenAI's form of the answer."""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageToolCall

from tests.gateway.fake import FakeBackend
from tests.gateway.strict import chat_chunks, chat_of
from tests.gateway.support import running
from trtforge.engine_process.requests import Guide
from trtforge.gateway.chat import read_chat
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.sequence import Delta
from trtforge.gateway.tool_calls import HeldCalls, split
from trtforge.gateway.tools import ToolUse

USER = {"role": "user", "content": "What is the weather?"}
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "$defs": {"city": {"type": "string"}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}
VALUE = {"const": {"$ref": "#/none"}}
TIME = {"type": "function", "function": {"name": "time"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
ARRAY = '[{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "time", "arguments": {}}]'
TAGGED = 'Let me see.\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'


def guide_of(**given: Any) -> Guide | None:
    return read_chat({"model": "m", "messages": [USER], **given}, GatewayLimits()).request.guide


def test_formats_of_json_become_guides() -> None:
    schema = {"type": "object", "properties": {"größe": {"type": "integer"}}}
    described = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert guide_of(response_format={"type": "text"}) is None
    assert guide_of(response_format={"type": "json_object"}) == Guide("json_schema", '{"type": "object"}')
    guide = guide_of(response_format=described)
    assert guide is not None
    assert (guide.kind, json.loads(guide.text)) == ("json_schema", schema)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_choice_of_the_model_has_no_guide(choice: str | None) -> None:
    assert guide_of(tools=[WEATHER], tool_choice=choice) is None


def test_tools_reach_the_template_unless_none_may_be_called() -> None:
    def messages(**given: Any) -> Any:
        request = read_chat(
            {"model": "m", "messages": [USER], "tools": [WEATHER, TIME], **given}, GatewayLimits()
        ).request
        assert request.messages is not None
        return json.loads(request.messages)

    assert messages() == {"messages": [USER], "tools": [WEATHER, TIME]}
    assert messages(tool_choice=NAMED) == {"messages": [USER], "tools": [WEATHER]}
    assert messages(tool_choice="none") == [USER]


def test_forced_calls_have_the_schema_of_the_functions() -> None:
    named = guide_of(tools=[TIME, WEATHER], tool_choice=NAMED)
    assert named is not None
    assert json.loads(named.text) == CITY
    several = guide_of(tools=[WEATHER, TIME], tool_choice="required")
    single = guide_of(tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False)
    assert several is not None
    assert single is not None
    jsonschema.validate(json.loads(ARRAY), json.loads(several.text))
    for guide, wrong in (
        (single, ARRAY),
        (several, "[]"),
        (several, '[{"name": "rain", "arguments": {}}]'),
        (several, '[{"name": "weather", "arguments": {"city": 5}}]'),
        (several, '[{"name": "time", "arguments": {"zone": "UTC"}}]'),
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(wrong), json.loads(guide.text))


def test_references_of_each_function_stay_its_own() -> None:
    tree = {"type": "object", "properties": {"default": {"$ref": "#"}, "$ref": {"$ref": "#/$defs/city"}, "v": VALUE}}
    tree |= {"$defs": {"city": {"type": "integer"}}, "additionalProperties": False}
    tools = [WEATHER, {"type": "function", "function": {"name": "tree", "parameters": tree}}]
    guide = guide_of(tools=tools, tool_choice="required")
    assert guide is not None
    checked = jsonschema.Draft202012Validator(json.loads(guide.text))
    for arguments in ({"default": {"default": {}}}, {"$ref": 5}, {"v": VALUE["const"]}):
        assert checked.is_valid([{"name": "tree", "arguments": arguments}])
    for arguments in ({"default": [{"name": "tree", "arguments": {}}]}, {"$ref": "Rome"}, {"default": {"v": {}}}):
        assert not checked.is_valid([{"name": "tree", "arguments": arguments}])
    assert checked.is_valid([{"name": "weather", "arguments": {"city": "Rome"}}])


def test_earlier_calls_and_their_results_are_part_of_the_chat() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    request = read_chat({"model": "m", "messages": turns}, GatewayLimits()).request
    assert request.messages is not None
    _, assistant, tool = json.loads(request.messages)
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert tool == {"role": "tool", "content": "sunny", "tool_call_id": "c1"}


AUTO = ToolUse("auto", ("weather", "time"))


@pytest.mark.parametrize(
    ("use", "text", "rest", "calls"),
    [
        (AUTO, "It is sunny.", "It is sunny.", []),
        (AUTO, TAGGED, "Let me see.", [("time", {})]),
        (AUTO, TAGGED.removesuffix("</tool_call>"), "Let me see.", [("time", {})]),
        (AUTO, "<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
        (AUTO, f"{TAGGED}\n{TAGGED}\nThat is all.", "Let me see.\n\nLet me see.\n\nThat is all.", [("time", {})] * 2),
        (AUTO, f"<tool_call>oops</tool_call> {TAGGED}", "<tool_call>oops</tool_call> Let me see.", [("time", {})]),
        (AUTO, LLAMA, "", [("weather", {"city": "Rome"})]),
        (AUTO, '{"name": "rain", "parameters": {}}', '{"name": "rain", "parameters": {}}', []),
        (AUTO, '{"city": "Rome"}', '{"city": "Rome"}', []),
        (ToolUse("required", AUTO.names), ARRAY, "", [("weather", {"city": "Köln"}), ("time", {})]),
        (ToolUse("required", AUTO.names, several=False), ARRAY, "", [("weather", {"city": "Köln"})]),
        (ToolUse("required", AUTO.names), '[{"name": "weath', '[{"name": "weath', []),
        (ToolUse("named", ("weather",)), '{"city": "Rome"}', "", [("weather", {"city": "Rome"})]),
    ],
)
def test_calls_are_found_in_the_text(
    use: ToolUse, text: str, rest: str, calls: Sequence[tuple[str, Mapping[str, Any]]]
) -> None:
    found = split(use, text)
    assert found[0] == rest
    assert [(call.name, json.loads(call.arguments)) for call in found[1]] == calls


@given(
    parts=st.lists(
        st.sampled_from(["So:", "\n", " ", "<tool_call>", "</tool_call>", "<tool", LLAMA, ARRAY]), max_size=6
    ),
    sizes=st.lists(st.sampled_from([1, 3, 200]), min_size=1, max_size=9),
)
@example(parts=["So:", LLAMA], sizes=[3, 200])
def test_a_stream_has_the_text_and_the_calls_of_the_whole_answer(parts: list[str], sizes: list[int]) -> None:
    text, held = "".join(parts), HeldCalls(AUTO)
    ends = [end for end in accumulate(sizes) if end < len(text)] + [len(text)]
    pieces = [text[start:end] for start, end in zip((0, *ends), ends, strict=False)]
    reasons = [None] * (len(pieces) - 1) + ["stop"]
    taken = [held.take(Delta(0, *each)) for each in zip(pieces, reasons, strict=True)]
    rest, calls = split(AUTO, text)
    assert "".join(delta.text for delta, _ in taken) == rest
    assert [(each.name, each.arguments) for each in taken[-1][1]] == [(each.name, each.arguments) for each in calls]


@pytest.mark.parametrize(
    ("words", "choice", "reason", "names", "content"),
    [
        (ARRAY, "required", "tool_calls", ["weather", "time"], None),
        ('{"city": "Rome"}', NAMED, "stop", ["weather"], None),
        (TAGGED, "auto", "tool_calls", ["time"], "Let me see."),
        (f"{TAGGED} Done.", "auto", "tool_calls", ["time"], "Let me see.\n Done."),
        ("{ but no call", "auto", "stop", [], "{ but no call"),
        ("a < b, and <tool", "auto", "stop", [], "a < b, and <tool"),
    ],
)
def test_calls_come_in_openais_form_whole_and_streamed(
    words: str, choice: object, reason: str, names: list[str], content: str | None
) -> None:
    backend = FakeBackend(words=tuple(words[start : start + 3] for start in range(0, len(words), 3)))
    asked = {"model": "ensemble", "messages": [USER], "tools": [WEATHER, TIME], "tool_choice": choice}
    with running([backend]) as gateway:
        whole = chat_of(gateway.post("chat/completions", **asked)).choices[0]
        chunks = chat_chunks(gateway.post("chat/completions", **asked, stream=True))
    assert whole.finish_reason == reason
    assert whole.message.content == content
    calls = whole.message.tool_calls or []
    assert all(isinstance(call, ChatCompletionMessageToolCall) for call in calls)
    assert [call.function.name for call in calls if call.type == "function"] == names
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == (content or "")
    streamed = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in streamed] == list(range(len(names)))
    functions = [call.function for call in streamed if call.function is not None]
    assert [(each.name, each.arguments) for each in functions] == [
        (call.function.name, call.function.arguments) for call in calls if call.type == "function"
    ]
    assert chunks[-1].choices[0].finish_reason == reason
    assert len({call.id for call in [*calls, *streamed]}) == 2 * len(names)


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", "so response_format can only be text"),
        ({"tools": [TIME], "tool_choice": "required"}, "tool_choice", "so tool_choice can only be auto or none"),
    ],
)
def test_a_model_without_guided_decoding_refuses_what_needs_it(given: dict[str, Any], param: str, said: str) -> None:
    with running([FakeBackend(old=True)]) as gateway:
        answer = gateway.post("chat/completions", model="ensemble", messages=[USER], **given)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"] == f"guided decoding is not available for this engine, {said}"
