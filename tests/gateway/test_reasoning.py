"""Reasoning apart from the answer: in chats, whole and streamed, and in OpenAI's Responses API."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from tests.gateway.fake import FakeBackend
from tests.gateway.strict import chat_chunks, events, response_events, response_of
from tests.gateway.support import Gateway, running
from tests.patience import PATIENCE
from trtforge.core.reasoning import ReasoningParser

QUESTION = {"role": "user", "content": "2 + 2?"}
THOUGHT = "<think>\nI add <b>two</b> numbers.\n</think>\n\nFour."
CALL = '<think>It asks.</think>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
TIME = {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}, "strict": False}


@contextmanager
def thinking(
    text: str, parser: ReasoningParser | None = "qwen3", thought: str | None = None
) -> Iterator[tuple[Gateway, FakeBackend]]:
    """A gateway over a model that answers with a text, two characters at a time. `thought`: see FakeBackend."""
    model = FakeBackend(tuple(text[start : start + 2] for start in range(0, len(text), 2)), thought=thought)
    with running([model], served_name="demo", reasoning=parser) as found:
        yield found, model


def chat(text: str, **more: object) -> dict[str, Any]:
    """A request with room for this answer."""
    return {"model": "demo", "messages": [QUESTION], "max_tokens": tokens(text), **more}


def tokens(text: str) -> int:
    return -(-len(text) // 2)


def streamed(gateway: Gateway, asked: dict[str, Any]) -> tuple[str, str]:
    """Reasoning and text of a streamed chat; reasoning comes first, and nothing else is new in an event."""
    reasoning, text = "", ""
    for event in events(gateway.post("chat/completions", **asked, stream=True)):
        delta = event["choices"][0]["delta"]
        assert delta.keys() <= {"role", "content", "reasoning_content"}
        reasoning += delta.get("reasoning_content", "")
        assert not (text and delta.get("reasoning_content"))
        text += delta.get("content", "")
    return reasoning, text


@pytest.mark.parametrize(
    ("parser", "answer", "reasoning", "text"),
    [
        ("qwen3", THOUGHT, "I add <b>two</b> numbers.", "Four."),
        ("qwen3", "Four.", "", "Four."),
        ("deepseek-r1", THOUGHT.removeprefix("<think>"), "I add <b>two</b> numbers.", "Four."),
        ("deepseek-r1", "I add for ever", "I add for ever", ""),
        (None, THOUGHT, "", THOUGHT),
    ],
)
def test_a_chat_returns_reasoning_apart(parser: ReasoningParser | None, answer: str, reasoning: str, text: str) -> None:
    with thinking(answer, parser) as (gateway, _):
        message = gateway.post("chat/completions", **chat(answer)).json()["choices"][0]["message"]
        assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, text)
        assert ("reasoning_content" in message) == bool(reasoning)
        assert streamed(gateway, chat(answer)) == (reasoning, text)
        if not reasoning:
            chat_chunks(gateway.post("chat/completions", **chat(answer), stream=True))


@pytest.mark.parametrize(("question", "text"), [("2 + 2?", "4"), ("2 + 2? Use <answer>.", "<answer>\n4\n</answer>")])
def test_tags_around_an_answer_are_shown_to_those_that_ask_for_them(question: str, text: str) -> None:
    answer = "<think>I add.</think>\n<answer>\n4\n</answer>"
    messages = [{"role": "user", "content": question}]
    with thinking(answer) as (gateway, _):
        assert streamed(gateway, chat(answer, messages=messages)) == ("I add.", text)
        response = gateway.post("responses", model="demo", input=question, max_output_tokens=tokens(answer))
        assert response_of(response).output_text == text


def test_calls_follow_reasoning() -> None:
    tools = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}]
    with thinking(CALL) as (gateway, _):
        choice = gateway.post("chat/completions", **chat(CALL, tools=tools)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "It asks."
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}


def test_a_guided_answer_has_no_reasoning() -> None:
    """It is what the schema says from its first token on."""
    answer = '{"a": "<think>"}'
    with thinking(answer, "deepseek-r1") as (gateway, _):
        asked = chat(answer, response_format={"type": "json_object"})
        message = gateway.post("chat/completions", **asked).json()["choices"][0]["message"]
        assert message["content"] == answer
        assert "reasoning_content" not in message


@pytest.mark.parametrize("variables", [{}, {"thinking": True}, {"enable_thinking": False, "thinking": False}])
@pytest.mark.parametrize("parser", ["qwen3", "deepseek-r1"])
@pytest.mark.parametrize(
    ("thought", "answer", "reasoning", "text"),
    [
        ("<think>", "I add.\n</think>\n\nFour.", "I add.", "Four."),
        ("<think>", "<think>I add.\n</think>\n\nFour.", "I add.", "Four."),
        ("[THINK]", "I </think> add.[/THINK]Four.", "I </think> add.", "Four."),
        ("", "Four.", "", "Four."),
        ("", "<think>I add.</think>Four.", "I add.", "Four."),
    ],
)
def test_the_end_of_the_prompt_tells_whether_an_answer_begins_with_reasoning(
    parser: ReasoningParser, thought: str, answer: str, reasoning: str, text: str, variables: dict[str, bool]
) -> None:
    """A template may ignore what turns thinking on or off, or end the prompt with `</think>` without being asked."""
    with thinking(answer, parser, thought) as (gateway, _):
        asked = chat(answer, chat_template_kwargs=variables)
        message = gateway.post("chat/completions", **asked).json()["choices"][0]["message"]
        assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, text)
        assert streamed(gateway, asked) == (reasoning, text)
        response = response_of(gateway.post("responses", model="demo", input="2 + 2?", chat_template_kwargs=variables))
    assert response.output_text == text
    thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.content or []]
    assert "".join(thoughts) == reasoning


def test_a_message_that_is_continued_tells_more_than_the_end_of_the_prompt() -> None:
    messages = [QUESTION, {"role": "assistant", "content": "<think>I add"}]
    with thinking(" two.</think>Four.", "qwen3", "") as (gateway, _):
        asked = chat(" two.</think>Four.", messages=messages, continue_final_message=True)
        assert streamed(gateway, asked) == (" two.", "Four.")
    messages = [QUESTION, {"role": "assistant", "content": "In Python:\n>>>"}]
    with thinking(" 2 + 2", None, ">>>") as (gateway, _):
        asked = chat(" 2 + 2", messages=messages, continue_final_message=True)
        assert streamed(gateway, asked) == ("", " 2 + 2")
        response = response_of(gateway.post("responses", model="demo", input=messages, continue_final_message=True))
    assert response.output_text == " 2 + 2"


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_a_model_that_shall_not_think_has_its_reasoning_in_the_prompt(name: str) -> None:
    with thinking("Four.", "deepseek-r1") as (gateway, _):
        asked = chat("Four.", chat_template_kwargs={name: False})
        assert streamed(gateway, asked) == ("", "Four.")
        response = {"model": "demo", "input": "2 + 2?", "chat_template_kwargs": {name: False}}
        assert [item.type for item in response_of(gateway.post("responses", **response)).output] == ["message"]
        assert streamed(gateway, asked | {"chat_template_kwargs": {name: True}}) == ("Four.", "")
        assert streamed(gateway, chat("Four.", reasoning_effort="none")) == ("", "Four.")
        assert streamed(gateway, chat("Four.", reasoning_effort="low")) == ("Four.", "")


@pytest.mark.parametrize("parser", ["qwen3", "deepseek-r1"])
@pytest.mark.parametrize(
    ("begun", "answer", "reasoning", "text"),
    [
        ("The answer", " is 4.", "", " is 4."),
        ("<think>I add.</think>The answer", " is 4.", "", " is 4."),
        ("<think>I add", " two.\n</think>\n\nFour.", " two.", "Four."),
        ("<think>\n", "\nI add.</think>Four.", "I add.", "Four."),
        ("[THINK]I add", " </think>.[/THINK]Four.", " </think>.", "Four."),
        ("", "<think>I add.</think>Four.", "I add.", "Four."),
    ],
)
def test_an_answer_that_continues_a_message_reasons_if_the_message_does(
    parser: ReasoningParser, begun: str, answer: str, reasoning: str, text: str
) -> None:
    continues = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [QUESTION, {"role": "assistant", "content": begun}]
    with thinking(answer, parser) as (gateway, _):
        asked = chat(answer, **continues, messages=messages)
        message = gateway.post("chat/completions", **asked).json()["choices"][0]["message"]
        assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, text)
        assert streamed(gateway, asked) == (reasoning, text)
        response = response_of(gateway.post("responses", model="demo", input=messages, **continues))
    assert response.output_text == text
    thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.content or []]
    assert "".join(thoughts) == reasoning


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_reasoning_reaches_the_chat_template(name: str) -> None:
    earlier = {"role": "assistant", "content": "Four.", name: "I add."}
    call = {"type": "function", "id": "a", "function": {"name": "time", "arguments": "{}"}}
    with thinking("So?") as (gateway, model):
        for message in (earlier, earlier | {"tool_calls": [call]}, QUESTION | {name: "ignored"}):
            gateway.post("chat/completions", **chat("So?") | {"messages": [QUESTION, message]})
        sent = [json.loads(request.messages or "")[1] for request in model.requests]
        refused = gateway.post("chat/completions", **chat("So?") | {"messages": [earlier | {name: ["I"]}]})
    assert [message.get("reasoning_content") for message in sent] == ["I add.", "I add.", None]
    assert refused.status_code == 400
    assert f"messages[0].{name} must be a string" in refused.json()["error"]["message"]


def test_a_response_has_an_item_of_reasoning_and_takes_it_back() -> None:
    asked: dict[str, Any] = {"model": "demo", "input": "2 + 2?", "max_output_tokens": tokens(THOUGHT)}
    with thinking(THOUGHT) as (gateway, model):
        whole = response_of(gateway.post("responses", **asked))
        found = response_events(gateway.post("responses", **asked, stream=True))
        client = openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=PATIENCE)
        with client.responses.stream(**asked) as stream:
            last = stream.get_final_response()
        items = [item.model_dump(exclude_none=True) for item in whole.output]
        client.responses.create(model="demo", input=[QUESTION, *items])  # type: ignore[list-item]
    for response in (whole, found[-1].response, last):  # type: ignore[union-attr]
        assert response is not None
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert [part.text for part in response.output[0].content] == ["I add <b>two</b> numbers."]  # type: ignore[union-attr]
        assert response.output_text == "Four."
    kinds = [event.type.removeprefix("response.") for event in found]
    assert list(dict.fromkeys(kinds)) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done"),
        "completed",
    ]
    deltas = [event for event in found if event.type == "response.reasoning_text.delta"]
    assert "".join(event.delta for event in deltas) == "I add <b>two</b> numbers."
    assert {event.output_index for event in found if event.type == "response.output_text.delta"} == {1}
    again = json.loads(model.requests[-1].messages or "")
    assert again[1] == {"role": "assistant", "content": "Four.", "reasoning_content": "I add <b>two</b> numbers."}


def test_a_response_may_end_in_its_reasoning_or_call_after_it() -> None:
    with thinking(THOUGHT) as (gateway, _):
        cut = {"model": "demo", "input": "2 + 2?", "max_output_tokens": 8}
        found = response_of(gateway.post("responses", **cut))
        assert (found.status, [item.type for item in found.output]) == ("incomplete", ["reasoning"])
        assert found.output[0].status == "incomplete"  # type: ignore[union-attr]
        ended = response_events(gateway.post("responses", **cut, stream=True))
        assert [item.type for item in ended[-1].response.output] == ["reasoning"]  # type: ignore[union-attr]
    with thinking(CALL) as (gateway, _):
        asked = {
            "model": "demo",
            "input": "What time is it?",
            "tools": [TIME],
            "max_output_tokens": tokens(CALL),
        }
        found = response_of(gateway.post("responses", **asked))
        assert [item.type for item in found.output] == ["reasoning", "function_call"]
        assert found.output[1].arguments == "{}"  # type: ignore[union-attr]
        events_of_calls = response_events(gateway.post("responses", **asked, stream=True))
        assert [item.type for item in events_of_calls[-1].response.output] == ["reasoning", "function_call"]  # type: ignore[union-attr]
