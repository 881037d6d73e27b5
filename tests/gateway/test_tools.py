"""JSON formats and calls of functions: the guide that is asked for, and OpenAI's form of the answer."""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageToolCall

from tests.gateway.fake import FakeBackend
from tests.gateway.strict import chat_chunks, chat_of
from tests.gateway.support import running
from trtforge.engine_process.requests import Guide
from trtforge.gateway.call_output import CallDelta
from trtforge.gateway.chat import read_chat
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.sequence import Delta
from trtforge.gateway.tool_calls import StreamedCalls, ToolCall, split
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
TYPED = LLAMA.replace("{", '{"type": "function", ', 1)
REORDERED = '{"parameters": {"city": "Rome"}, "name": "weather"}'


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


def test_a_format_is_that_of_answers_without_calls() -> None:
    """The model may call instead, where the text model knows how; a forced call leaves nothing else to say."""
    form = {"response_format": {"type": "json_object"}}

    def asked(**given: Any) -> tuple[Guide | None, Any]:
        request = read_chat({"model": "m", "messages": [USER], **form, **given}, GatewayLimits()).request
        return request.guide, json.loads(request.messages or "")

    guide, messages = asked(tools=[WEATHER])
    assert guide == Guide("json_schema", '{"type": "object"}')
    assert messages == {"messages": [USER], "tools": [WEATHER], "guide_allows_calls": True}
    assert asked(tools=[WEATHER], tool_choice="none") == (guide, [USER])
    assert asked() == (guide, [USER])
    guide, messages = asked(tools=[WEATHER], tool_choice="required")
    assert guide == guide_of(tools=[WEATHER], tool_choice="required")
    assert messages == {"messages": [USER], "tools": [WEATHER]}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_may_list_the_functions_that_are_allowed(mode: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}
    given = {"model": "m", "messages": [USER], "tools": [WEATHER, TIME], "tool_choice": choice}
    call = read_chat(given, GatewayLimits())
    assert call.structure.tools == [WEATHER]
    assert call.structure.use is not None
    assert (call.structure.use.mode, list(call.structure.use.names)) == (mode, ["weather"])


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


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Rome"}', {"city": "Rome"}),
        ("", {}),
        (" \n", {}),
        ("[]", []),
        ("null", None),
        ('{"city": "Ro', '{"city": "Ro'),
    ],
)
def test_earlier_calls_and_their_results_are_part_of_the_chat(arguments: str, shown: object) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    request = read_chat({"model": "m", "messages": turns}, GatewayLimits()).request
    assert request.messages is not None
    _, assistant, tool = json.loads(request.messages)
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": shown}
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
    found = split(use, text, "stop")
    assert found[0] == rest
    assert [(call.name, json.loads(call.arguments)) for call in found[1]] == calls


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (f"{LLAMA}; {LLAMA}", "", [ToolCall("weather", '{"city": "Rome"}')] * 2),
        (f"{LLAMA}\n\n", "", [ToolCall("weather", '{"city": "Rome"}')]),
        (f"{LLAMA} it is.", " it is.", [ToolCall("weather", '{"city": "Rome"}')]),
        (f'{LLAMA}; {{"name": "rain"}}', '; {"name": "rain"}', [ToolCall("weather", '{"city": "Rome"}')]),
        (f'{LLAMA}; {{"name": "rain"', '; {"name": "rain"', [ToolCall("weather", '{"city": "Rome"}')]),
        (f"{TYPED}\n\nThis calls", "\n\nThis calls", [ToolCall("weather", '{"city": "Rome"}')]),
        (f"{TYPED}; {TYPED}", "", [ToolCall("weather", '{"city": "Rome"}')] * 2),
        (f"{TYPED}\n{LLAMA};\n{REORDERED} So.", " So.", [ToolCall("weather", '{"city": "Rome"}')] * 3),
        (f"{REORDERED}; {TYPED}; it is.", "; it is.", [ToolCall("weather", '{"city": "Rome"}')] * 2),
        (f'{REORDERED}{{"a": 1}} {TYPED}', f'{{"a": 1}} {TYPED}', [ToolCall("weather", '{"city": "Rome"}')]),
        (f"{REORDERED}, {TYPED}", f", {TYPED}", [ToolCall("weather", '{"city": "Rome"}')]),
        (f'{{"a": 1}}; {TYPED}', f'{{"a": 1}}; {TYPED}', []),
        (f"[{TYPED}, {TYPED}]", "", [ToolCall("weather", '{"city": "Rome"}')] * 2),
        (f"{TYPED.replace('weather', 'rain')} So.", f"{TYPED.replace('weather', 'rain')} So.", []),
        (f"{{ {TYPED}", f"{{ {TYPED}", []),
        ('{"parameters": {"a": "<tool_call>"}, "name": "time"}', "", [ToolCall("time", '{"a": "<tool_call>"}')]),
        (f"[{LLAMA}, 5]", "", [ToolCall("weather", '{"city": "Rome"}')]),
        ('{"parameters": {"city": 1}, "name": "weather"}', "", [ToolCall("weather", '{"city": 1}')]),
        ('{"type": "function", "name": "time", "parameters": {}}', "", [ToolCall("time", "{}")]),
        ('{"name": "time", "parameters": {}, "id": "}"}', "", [ToolCall("time", "{}")]),
        ('{"name": "time", "parameters": {"a": "<tool_call>"}}', "", [ToolCall("time", '{"a": "<tool_call>"}')]),
        ('{"name": "time", "parameters": {"a": "}\\"]', "", [ToolCall("time", '{"a": "}\\"]', complete=False)]),
        ('{"name": "time", "param', '{"name": "time", "param', []),
    ],
)
def test_calls_in_unusual_forms(text: str, rest: str, calls: Sequence[ToolCall]) -> None:
    assert split(AUTO, text, "length") == (rest, calls)
    if text.startswith("[") or calls[1:]:
        return
    tagged = f"So.<tool_call>{text}</tool_call>So.<tool_call>{text}</tool_call>"
    if calls and calls[0].complete and not rest:
        assert split(AUTO, tagged, "stop") == ("So.So.", calls * 2)


def test_an_answer_that_begins_with_an_object_is_held_back_up_to_its_end() -> None:
    streamed = StreamedCalls(AUTO)
    pieces = ['{"a": {"b": ', "1}", "}", " is", " it"]
    told = ["".join(map(str, streamed.take(Delta(0, piece))[1])) for piece in pieces]
    assert told == ["", "", '{"a": {"b": 1}}', " is", " it"]


def test_json_that_breaks_off_ends_with_its_tag() -> None:
    broken = '<tool_call>{"name": "time", "arguments": {"a": [1, </tool_call> Sorry.'
    assert split(AUTO, broken, "stop") == (" Sorry.", [ToolCall("time", '{"a": [1, ', complete=False)])


def test_arguments_come_as_they_are_written() -> None:
    streamed = StreamedCalls(AUTO)
    text = 'I ask.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    ends = [text.index(part) for part in ("</tool", '"arg', "{", ": {", ' "Ro', '"}}', "}\n")]
    told = [streamed.take(Delta(0, text[start:end]))[1] for start, end in pairwise(sorted({0, *ends, len(text) - 13}))]
    told.append(streamed.take(Delta(0, text[len(text) - 13 :], "stop"))[1])
    assert [each for each in told if each] == [
        ["I ask."],
        [CallDelta(0, '{"city":', "weather")],
        [CallDelta(0, ' "Rome')],
        [CallDelta(0, '"}', last=True)],
    ]
    named = StreamedCalls(ToolUse("named", ("weather",)))
    assert [named.take(Delta(0, *each))[1] for each in (('{"ci', None), ('ty": 1', None), ("}", "stop"))] == [
        [CallDelta(0, '{"ci', "weather")],
        [CallDelta(0, 'ty": 1')],
        [CallDelta(0, "}", last=True)],
    ]


def merged(told: Sequence[str | CallDelta]) -> list[ToolCall]:
    """The calls of a stream. Names come first, and what is complete stays so."""
    calls: list[ToolCall] = []
    for each in told:
        if isinstance(each, str):
            continue
        if each.name is not None:
            assert each.index == len(calls)
            calls.append(ToolCall(each.name, each.arguments, each.last))
        else:
            before = calls[each.index]
            assert not before.complete
            calls[each.index] = ToolCall(before.name, before.arguments + each.arguments, each.last)
    return calls


def streams_as_a_whole(use: ToolUse, text: str, sizes: Sequence[int], reason: str) -> Sequence[ToolCall]:
    """Check that text in pieces of these sizes has the text and the calls of the whole one; returns the calls."""
    streamed = StreamedCalls(use)
    ends = [end for end in accumulate(sizes) if end < len(text)] + [len(text)]
    pieces = [text[start:end] for start, end in zip((0, *ends), ends, strict=False)]
    reasons = [None] * (len(pieces) - 1) + [reason]
    taken = [streamed.take(Delta(0, *each)) for each in zip(pieces, reasons, strict=True)]
    rest, calls = split(use, text, reason)
    assert "".join(delta.text for delta, _ in taken) == rest
    assert merged([each for _, told in taken for each in told]) == calls
    asks = calls and (calls[-1].complete or use.mode == "auto")
    assert taken[-1][0].finish_reason == ("tool_calls" if asks and reason == "stop" else reason)
    assert use.several or len(calls) <= 1
    if not calls:
        assert rest == text
    return calls


PARTS = ["So:", "\n", " ", "<tool_call>", "</tool_call>", "<tool", LLAMA, ARRAY, TAGGED, ";", ",", "[", "]", "{", "}"]
PARTS += [
    '"',
    "\\",
    '{"name": "time", "arguments": {"a": ',
    '{"name": "time", ',
    '"arguments": {}}',
    LLAMA[:30],
    TYPED,
    TYPED[:30],
    REORDERED,
    '{"a": 1}',
    " " * 120,
]


@given(
    use=st.sampled_from([AUTO, ToolUse("auto", AUTO.names, several=False), ToolUse("required", AUTO.names)]),
    parts=st.lists(st.sampled_from(PARTS), max_size=8),
    sizes=st.lists(st.sampled_from([1, 3, 40, 200]), min_size=1, max_size=9),
    reason=st.sampled_from(["stop", "length"]),
)
@example(use=AUTO, parts=["So:", LLAMA], sizes=[3, 200], reason="stop")
@example(use=AUTO, parts=[TYPED, REORDERED, ";", TYPED], sizes=[1] * 300, reason="stop")
@example(use=AUTO, parts=[" " * 120, TYPED, " " * 120, REORDERED], sizes=[1] * 500, reason="stop")
def test_a_stream_has_the_text_and_the_calls_of_the_whole_answer(
    use: ToolUse, parts: list[str], sizes: list[int], reason: str
) -> None:
    streams_as_a_whole(use, "".join(parts), sizes, reason)


@pytest.mark.parametrize(
    ("words", "choice", "reason", "names", "content"),
    [
        (ARRAY, "required", "tool_calls", ["weather", "time"], None),
        (ARRAY[:46], "required", "stop", ["weather"], None),  # a stop word of the request cut it
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
    assert all(call.function is not None for call in streamed)
    told = [CallDelta(call.index, call.function.arguments or "", call.function.name) for call in streamed]  # type: ignore[union-attr]
    assert [(call.name, call.arguments) for call in merged(told)] == [
        (call.function.name, call.function.arguments) for call in calls if call.type == "function"
    ]
    pieces = [len([call for call in streamed if call.index == index]) for index in range(len(names))]
    assert all(count > 1 or call.arguments == "{}" for count, call in zip(pieces, merged(told), strict=True))
    first = [call for call in streamed if call.id is not None]
    assert [(call.index, call.type) for call in first] == [(index, "function") for index in range(len(names))]
    assert chunks[-1].choices[0].finish_reason == reason
    assert len({call.id for call in [*calls, *first]}) == 2 * len(names)


def test_openais_client_follows_the_arguments_of_two_calls() -> None:
    words = f"{LLAMA}; {LLAMA.replace('Rome', 'Oslo')}"
    backend = FakeBackend(words=tuple(words[start : start + 3] for start in range(0, len(words), 3)))
    tools: Any = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]  # type: ignore[dict-item]
    with running([backend]) as gateway:
        client = openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0)
        messages: Any = [USER]
        with client.chat.completions.stream(model="ensemble", messages=messages, tools=tools) as stream:
            found = list(stream)
    deltas = [each for each in found if each.type == "tool_calls.function.arguments.delta"]
    done = [each for each in found if each.type == "tool_calls.function.arguments.done"]
    assert {each.index for each in deltas} == {0, 1}
    assert all(len([each for each in deltas if each.index == index]) > 2 for index in (0, 1))
    assert [(each.name, each.index, json.loads(each.arguments)) for each in done] == [
        ("weather", 0, {"city": "Rome"}),
        ("weather", 1, {"city": "Oslo"}),
    ]


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
