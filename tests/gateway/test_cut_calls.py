"""Calls that a stop string of the request cuts: they are not complete, in chats and responses, whole and streamed."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.fake import FakeBackend
from tests.gateway.strict import chat_chunks, chat_of, response_events, response_of
from tests.gateway.support import running
from tests.gateway.test_tools import USER, merged
from trtforge.core.reasoning import reader_of
from trtforge.gateway.call_output import CallDelta
from trtforge.gateway.generation import Choice
from trtforge.gateway.request import Piece, TextRequest
from trtforge.gateway.sequence import AnswerSequence, Delta
from trtforge.gateway.tool_calls import StreamedCalls, ToolCall, split
from trtforge.gateway.tools import ToolUse

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTION = {"name": "weather", "parameters": WEATHER}
ARGUMENTS = '{"city": "New York", "days": 33}'
AS_JSON = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
CODER = """<tool_call>
<function=weather>
<parameter=city>
New York
</parameter>
<parameter=days>
33
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>New York</arg_value>
<arg_key>days</arg_key>
<arg_value>33</arg_value>
</tool_call>"""
MINIMAX = """<minimax:tool_call>
<invoke name="weather">
<parameter name="city">New York</parameter>
<parameter name="days">33</parameter>
</invoke>
</minimax:tool_call>"""
OSS = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
HERMES = f"<tool_call>\n{AS_JSON}\n</tool_call>"
DEEPSEEK = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
KIMI = f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
MISTRAL = f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"
LLAMA = AS_JSON.replace("arguments", "parameters")
DSML = """<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">New York</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">33</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
LFM = "<|tool_call_start|>[weather(city='New York', days=33)]<|tool_call_end|>"
GEMMA = '<|tool_call>call:weather{city:<|"|>New York<|"|>,days:33}<tool_call|>'
COHERE = f"""<|START_ACTION|>[
    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {ARGUMENTS}}}
]<|END_ACTION|>"""
FORMS = (CODER, GLM, MINIMAX, OSS, HERMES, DEEPSEEK, KIMI, MISTRAL, LLAMA, DSML, LFM, GEMMA, COHERE)
TAGGED = (CODER, GLM, MINIMAX, DSML)
USE = ToolUse("auto", ("weather",), True, {"weather": WEATHER})


def chats(words: str, stop: str) -> list[tuple[str | None, list[tuple[str | None, str]], str]]:
    """Finish reason, calls and text of a chat that this stop string ends: whole, then streamed."""
    tools = [{"type": "function", "function": FUNCTION}]
    with running([backend(words)]) as gateway:
        asked = {"model": "ensemble", "messages": [USER], "tools": tools, "stop": [stop]}
        whole = chat_of(gateway.post("chat/completions", **asked)).choices[0]
        chunks = chat_chunks(gateway.post("chat/completions", **asked, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    parts = [call for delta in deltas for call in delta.tool_calls or [] if call.function]
    told = [CallDelta(each.index, each.function.arguments or "", each.function.name) for each in parts if each.function]
    calls = [call.function for call in whole.message.tool_calls or [] if call.type == "function"]
    return [
        (whole.finish_reason, [(each.name, each.arguments) for each in calls], whole.message.content or ""),
        (
            chunks[-1].choices[0].finish_reason,
            [(each.name, each.arguments) for each in merged(told)],
            "".join(delta.content or "" for delta in deltas),
        ),
    ]


def responses(words: str, stop: str) -> list[tuple[str | None, list[tuple[str, str, str | None]]]]:
    """Status of a response that this stop string ends, and its calls with their status: whole, then streamed."""
    tools = [{"type": "function", "strict": False, **FUNCTION}]
    with running([backend(words)]) as gateway:
        asked = {"model": "ensemble", "input": "Hi", "tools": tools, "stop": [stop]}
        whole = response_of(gateway.post("responses", **asked))
        last = response_events(gateway.post("responses", **asked, stream=True))[-1]
    assert last.type == "response.completed"
    return [
        (
            each.status,
            [(item.name, item.arguments, item.status) for item in each.output if item.type == "function_call"],
        )
        for each in (whole, last.response)
    ]


def backend(words: str) -> FakeBackend:
    return FakeBackend(words=tuple(words[start : start + 3] for start in range(0, len(words), 3)))


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_a_stop_string_cuts_is_not_complete(form: str) -> None:
    cut = '{"city": "New '
    assert chats(form, "York") == [("stop", [("weather", cut)], "")] * 2
    assert responses(form, "York") == [("completed", [("weather", cut, "incomplete")])] * 2


@pytest.mark.parametrize(
    ("form", "stop"), [(CODER, "3\n<"), (GLM, "3</"), (MINIMAX, "3</"), (DSML, "3</"), (LFM, "3)"), (GEMMA, "3}")]
)
def test_a_number_that_a_stop_string_cuts_is_left_out(form: str, stop: str) -> None:
    cut = '{"city": "New York", "days": '
    assert chats(form, stop) == [("stop", [("weather", cut)], "")] * 2
    assert responses(form, stop) == [("completed", [("weather", cut, "incomplete")])] * 2


def test_a_call_of_gpt_oss_that_is_cut_before_its_arguments_is_none() -> None:
    assert chats(OSS, '{"city"') == [("stop", [], "")] * 2
    assert responses(OSS, '{"city"') == [("completed", [])] * 2


@pytest.mark.parametrize(
    ("form", "stop"),
    [
        (CODER, "</tool_call>"),
        (CODER, "\n</tool"),
        (CODER, "</function>"),
        (GLM, "</tool_call>"),
        (MINIMAX, "</minimax:tool_call>"),
        (MINIMAX, "</invoke>"),
        (OSS, "<|call|>"),
        (HERMES, "</tool_call>"),
        (DEEPSEEK, "<｜tool▁call▁end｜>"),
        (KIMI, "<|tool_call_end|>"),
        (f"{MISTRAL} So.", " So"),
        (f"{LLAMA}\n", "\n"),
    ],
)
def test_a_stop_string_after_a_call_leaves_it_complete(form: str, stop: str) -> None:
    assert chats(form, stop) == [("tool_calls", [("weather", ARGUMENTS)], "")] * 2
    assert responses(form, stop) == [("completed", [("weather", ARGUMENTS, "completed")])] * 2


@pytest.mark.parametrize("form", TAGGED)
@pytest.mark.parametrize("stop", ["\n<", "<"])
def test_arguments_may_go_on_after_a_stop_string_that_may_begin_another_one(form: str, stop: str) -> None:
    (call,) = split(USE, form.partition("33")[0].rpartition("<")[0].rstrip(), "stop", stop)[1]
    assert not call.complete


def test_calls_before_the_one_that_is_cut_are_complete() -> None:
    words = f"{CODER}\n{CODER.replace('New York', 'Oslo')}"
    assert chats(words, "lo") == [("stop", [("weather", ARGUMENTS), ("weather", '{"city": "Os')], "")] * 2
    assert (
        responses(words, "lo")
        == [("completed", [("weather", ARGUMENTS, "completed"), ("weather", '{"city": "Os', "incomplete")])] * 2
    )


@given(
    form=st.sampled_from(FORMS),
    place=st.integers(0, 200),
    length=st.integers(1, 8),
    size=st.sampled_from([1, 3, 40, 200]),
)
def test_a_complete_call_has_the_arguments_that_the_model_wrote(form: str, place: int, length: int, size: int) -> None:
    """Wherever a stop string is, and whatever the pieces."""
    at = place % len(form)
    stop = form[at : at + length]
    new_reader = partial(reader_of, None, USE.names)
    sequence, streamed = AnswerSequence(request(stop), 0, new_reader), StreamedCalls(USE)
    deltas = [
        delta for start in range(0, len(form), size) for delta in sequence.take(Piece(text=form[start : start + size]))
    ]
    deltas += sequence.end()
    choice = choice_of(deltas)
    taken = [streamed.take(delta) for delta in deltas]
    text, calls = split(USE, choice.text, choice.finish_reason, choice.stop_word)
    assert "".join(delta.text for delta, _ in taken) == text
    assert merged([each for _, told in taken for each in told]) == calls
    check(calls, taken[-1][0].finish_reason)


def request(stop: str) -> TextRequest:
    return TextRequest("m", 10, stop=(stop,))


def choice_of(deltas: Sequence[Delta]) -> Choice:
    parts = [(delta.reasoning, delta.text) for delta in deltas]
    return Choice(parts, deltas[-1].finish_reason or "", stop_word=deltas[-1].stop_word)


def check(calls: Sequence[ToolCall], reason: Any) -> None:
    assert reason == ("tool_calls" if calls and calls[-1].complete else "stop")
    for call in calls:
        if call.complete:
            assert json.loads(call.arguments) == json.loads(ARGUMENTS)
