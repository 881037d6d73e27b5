"""Requests to /v1/responses: those of chats in other words, what is refused, and by which field."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.test_requests import JSON, LIMITS, TOOL, USER, check, refusal
from trtforge.gateway.chat import read_chat
from trtforge.gateway.request import TextRequest
from trtforge.gateway.responses import KNOWN, read_response
from trtforge.gateway.sampling_fields import MOST_TOKENS

FLAT = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
STRICT_TOOL = {**TOOL, "function": {**TOOL["function"], "strict": True}}
OTHER = {"type": "function", "name": "time", "parameters": None, "strict": False}
OTHER_TOOL = {"type": "function", "function": {"name": "time"}}
SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
NAMED = {"type": "function", "function": {"name": "time"}}


def response(**values: object) -> TextRequest:
    return read_response({"model": "m", "input": "Hello", **values}, LIMITS).chat.request


def messages(**values: object) -> Any:
    return json.loads(response(**values).messages or "")


@pytest.mark.parametrize(
    ("asked", "chat"),
    [
        ({}, {}),
        ({"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"temperature": 0.5, "top_p": 0.25}, {"temperature": 0.5, "top_p": 0.25}),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, {"stream": True}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"include": ["reasoning.encrypted_content"], "top_logprobs": 0}, {}),
        ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": FORMAT}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        ),
        ({"tools": [FLAT]}, {"tools": [STRICT_TOOL]}),
        ({"tools": [FLAT], "tool_choice": "none"}, {"tools": [STRICT_TOOL], "tool_choice": "none"}),
        (
            {"tools": [FLAT, OTHER], "tool_choice": "required"},
            {"tools": [STRICT_TOOL, OTHER_TOOL], "tool_choice": "required"},
        ),
        (
            {"tools": [FLAT, OTHER], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": [STRICT_TOOL, OTHER_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [FLAT, OTHER], "tool_choice": {"type": "function", "name": "time"}},
            {"tools": [STRICT_TOOL, OTHER_TOOL], "tool_choice": NAMED},
        ),
        (
            {"tools": [FLAT, OTHER], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [OTHER]}},
            {"tools": [OTHER_TOOL], "tool_choice": "required"},
        ),
        *(
            (more, more)
            for more in (
                {"top_k": 40, "repetition_penalty": 1.5, "min_tokens": 3, "seed": -3, "stop": ["a", "b"]},
                {"presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": -100}},
                {"priority": 0.5, "cache_salt": "tenant 1", "chat_template_kwargs": {"enable_thinking": False}},
                {"add_generation_prompt": False, "continue_final_message": True},
                {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "prompt_cache_key": "k"},
            )
        ),
        (
            {"truncation": "disabled", "background": False, "reasoning": {"effort": None, "summary": "auto"}},
            {"safety_identifier": "s", "prompt_cache_retention": "24h"},
        ),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
        ({"documents": [{"text": "a"}]}, {"documents": [{"text": "a"}]}),
    ],
)
def test_a_response_asks_the_model_for_what_a_chat_asks(asked: Mapping[str, Any], chat: Mapping[str, Any]) -> None:
    call = read_response({"model": "m", "input": "Hello", **asked}, LIMITS).chat
    expected = read_chat({"model": "m", "messages": [USER], **chat}, LIMITS)
    assert call.request == expected.request
    assert call.structure.use == expected.structure.use
    assert call.delivery == expected.delivery
    assert call.thinks == expected.thinks


def test_reasoning_between_a_message_and_a_call_belongs_to_the_call() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "I ask."}]}
    call = {"type": "function_call", "call_id": "c1", "name": "time", "arguments": "{}"}
    said = {"role": "assistant", "content": "So."}
    made = messages(input=[{"role": "user", "content": "Hello"}, said, thought, call, call | {"call_id": "c2"}])
    assert made[:2] == [USER, said]
    assert [made[2]["content"], made[2]["reasoning_content"]] == ["", "I ask."]
    assert [each["id"] for each in made[2]["tool_calls"]] == ["c1", "c2"]


def test_the_form_of_a_text_is_its_default() -> None:
    assert response().max_tokens == MOST_TOKENS
    assert messages(instructions="Be brief.") == [{"role": "system", "content": "Be brief."}, USER]


def test_items_become_messages() -> None:
    parts = [{"type": "input_text", "text": "one "}, {"type": "input_text", "text": "two"}]
    said = [{"type": "output_text", "text": "three", "annotations": []}, {"type": "refusal", "refusal": " no"}]
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": parts},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": None, "content": said},
        {"role": "system", "content": "Now."},
    ]
    assert messages(input=items) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "three no"},
        {"role": "system", "content": "Now."},
    ]


def test_calls_join_the_message_before_them_as_in_chats() -> None:
    second = {**CALL, "call_id": "c2", "arguments": "{"}
    outputs = [OUTPUT, {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]}]
    said = {"role": "assistant", "content": "Let me see."}
    asked = {"model": "m", "messages": [USER, {**said, "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}]}]}
    asked["messages"][1]["tool_calls"][1]["function"] = {"name": "weather", "arguments": "{"}  # type: ignore[index]
    asked["messages"] += [  # type: ignore[operator]
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    ]
    expected = read_chat(asked, LIMITS).request.messages
    assert response(input=[{"role": "user", "content": "Hello"}, said, CALL, second, *outputs]).messages == expected
    alone = messages(input=[CALL, OUTPUT, CALL])
    assert [(each["role"], each["content"], len(each.get("tool_calls", ()))) for each in alone] == [
        ("assistant", "", 1),
        ("tool", "sunny", 0),
        ("assistant", "", 1),
    ]


STORED = "not stored by this server"


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"model": None}, "model", "you must provide the parameter model"),
        ({"input": None}, "input", "you must provide the parameter input"),
        ({"input": []}, "input", "a string or a non-empty array of items, not an array of 0"),
        ({"input": {}}, "input", "not an object"),
        ({"input": [USER] * 4097}, "input", "4097 items, at most 4096"),
        ({"input": ["Hi"]}, "input[0]", "an object, not a string"),
        ({"input": [{}]}, "input[0]", "items of type 'missing' are not supported, message, function_call,"),
        ({"input": [{"type": "reasoning", "id": "r"}]}, "input", "input holds nothing but reasoning"),
        ({"input": [{"type": "reasoning", "content": [{"type": "text"}]}]}, "input[0].content[0]", "of type 'text'"),
        ({"input": [{"type": "mcp_call", "id": "r"}]}, "input[0]", "items of type 'mcp_call'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "answers are not stored, so send the item"),
        ({"input": [USER, {"id": "x"}]}, "input[1]", "is an item_reference"),
        ({"input": [{**USER, "role": "tool"}]}, "input[0].role", "one of system, developer, user, assistant"),
        ({"input": [{"role": "user"}]}, "input[0].content", "a string or an array of text parts, not null"),
        ({"input": [{**USER, "content": [{}] * 1025}]}, "input[0].content", "1025 parts, at most 1024"),
        (
            {"input": [{**USER, "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "parts of type 'input_image' are not supported, this model takes text",
        ),
        ({"input": [{**USER, "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "a string, not null"),
        ({"input": [{**CALL, "call_id": ""}]}, "input[0].call_id", "a non-empty string, not an empty string"),
        ({"input": [{**CALL, "name": 5}]}, "input[0].name", "a non-empty string, not 5"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments", "a string, not an object"),
        ({"input": [OUTPUT]}, "input[0].call_id", "no function_call before input[0] has its call_id"),
        ({"input": [CALL, {**OUTPUT, "output": 5}]}, "input[1].output", "a string or an array of text parts, not 5"),
        ({"instructions": ["x"]}, "instructions", "a string, not an array of 1"),
        ({"max_output_tokens": 0}, "max_output_tokens", "from 1 to"),
        ({"temperature": 5}, "temperature", "from 0 to 2, not 5"),
        ({"top_logprobs": 2}, "top_logprobs", 'needs "include": ["message.output_text.logprobs"]'),
        ({"top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"include": "x"}, "include", "an array of message.output_text.logprobs, "),
        ({"include": ["x"]}, "include", "not an array of 1"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", f"answers are {STORED}; send the earlier items"),
        ({"conversation": {"id": "c"}}, "conversation", f"conversations are {STORED}"),
        ({"prompt": {"id": "p"}}, "prompt", f"prompts are {STORED}; send instructions and input"),
        ({"background": True}, "background", "with stream true to read an answer as it comes"),
        ({"background": 1}, "background", "true or false"),
        ({"truncation": "auto"}, "truncation", "must be disabled: send fewer items"),
        ({"context_management": []}, "context_management", "input is not shortened"),
        ({"moderation": {}}, "moderation", "not supported"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort", "must be one of none, minimal, low, medium"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "must be one of none, minimal, low, medium"),
        ({"reasoning": {"efort": "low"}}, "reasoning.efort", "did you mean reasoning.effort?"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "say it in instructions"),
        ({"text": {"format": []}}, "text.format", "an object, not an array of 0"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be text, json_object or json_schema"),
        ({"text": {"format": {**FORMAT, "name": "a b"}}}, "text.format.name", "1 to 64 letters, digits, _ or -"),
        ({"text": {"format": {**FORMAT, "schema": None}}}, "text.format.schema", "an object, not null"),
        ({"text": {"format": {**FORMAT, "strict": 1}}}, "text.format.strict", "true or false, not 1"),
        ({"text": {"fromat": {}}}, "text.fromat", "did you mean text.format?"),
        ({"tools": {}}, "tools", "an array of at most 128 tools, not an object"),
        ({"tools": [5]}, "tools[0]", "tools of type 'missing' are not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "tools of type 'web_search' are not supported"),
        ({"tools": [TOOL]}, "tools[0]", "has the form of chat/completions; name and parameters belong into the tool"),
        ({"tools": [{**FLAT, "name": ""}]}, "tools[0].name", "1 to 64 letters, digits, _ or -"),
        ({"tools": [{**FLAT, "parameters": 5}]}, "tools[0].parameters", "an object, not 5"),
        ({"tools": [{**FLAT, "description": 5}]}, "tools[0].description", "a string, not 5"),
        ({"tools": [FLAT, FLAT]}, "tools[1].name", "two functions named weather"),
        ({"tool_choice": "required"}, "tool_choice", "only allowed when tools are given"),
        ({"tools": [FLAT], "tool_choice": "always"}, "tool_choice", "must be none, auto, required, an object"),
        ({"tools": [FLAT], "tool_choice": NAMED}, "tool_choice", "or one of type allowed_tools"),
        ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "sun"}}, "tool_choice", "not in tools"),
        (
            {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [OTHER]}},
            "tool_choice",
            "must name functions that are in tools",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
        ({"include": {}}, "include", "an array of"),
        ({"include": False}, "include", "an array of"),
        ({"stop": 0}, "stop", "a string or an array of strings, not 0"),
        ({"input": [{"type": {}, **USER}]}, "input[0]", "items of type 'missing' are not supported"),
        ({"input": [{"type": "reasoning", "content": 0}]}, "input[0].content", "an array of text parts, not 0"),
        ({"metadata": {"a": 5}}, "metadata", "at most 16 strings of 512 characters, with keys of 64"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "at most 16 strings"),
        ({"user": 5}, "user", "a string, not 5"),
        ({"stream_options": {}}, "stream_options", "only allowed when stream is true"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage", "unrecognized"),
        ({"messages": [USER]}, "messages", "a field of chat/completions; /v1/responses has input"),
        ({"max_tokens": 5}, "max_tokens", "a field of chat/completions; /v1/responses has max_output_tokens"),
        ({"n": 2}, "n", "has one answer to a request"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ],
)  # fmt: skip
def test_refused_responses_name_the_field(given: Mapping[str, Any], param: str, said: str) -> None:
    error = refusal(read_response, {"model": "m", "input": "Hello", **given})
    assert error.param == param
    assert said in error.message


@given(st.dictionaries(st.sampled_from(sorted(KNOWN)), JSON, max_size=6))
def test_any_response_is_read_or_refused_with_a_field(values: dict[str, Any]) -> None:
    check({"model": "m", "input": "Hello", **values}, lambda given, limits: read_response(given, limits).chat)
