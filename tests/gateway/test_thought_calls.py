"""Calls in reasoning: they count if the answer ends with them, wherever the stream is cut."""

import json
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.gateway.strict import events, response_events, response_of
from tests.gateway.test_call_forms import APRIEL, GRANITE, NEMOTRON, PHI, SEED
from tests.gateway.test_cut_calls import ARGUMENTS, AS_JSON, CODER, DEEPSEEK, GLM, HERMES, KIMI, MINIMAX, MISTRAL
from tests.gateway.test_reasoning import chat, thinking
from tests.gateway.test_tools import merged
from trtforge.core.reasoning import ReasoningParser, reader_of
from trtforge.gateway.call_output import CallDelta
from trtforge.gateway.call_reader import CallReader
from trtforge.gateway.final_calls import final_calls
from trtforge.gateway.request import Piece, TextRequest
from trtforge.gateway.sequence import AnswerSequence
from trtforge.gateway.thought_calls import with_calls
from trtforge.gateway.tool_calls import StreamedCalls, ToolCall, split
from trtforge.gateway.tools import ToolUse

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
USE = ToolUse("auto", ("weather", "time"), True, {"weather": WEATHER})
CALL = ToolCall("weather", ARGUMENTS)
FORMS = (HERMES, CODER, GLM, MINIMAX, DEEPSEEK, KIMI, MISTRAL, f"<function=weather>{ARGUMENTS}</function>")
FORMS += (PHI, NEMOTRON, APRIEL, GRANITE, SEED)
Read = tuple[str, str, list[ToolCall], str | None]
"""Reasoning, text, calls and finish reason of an answer."""


def read(
    pieces: Sequence[str],
    parser: ReasoningParser | None = "qwen3",
    reason: str = "stop",
    use: ToolUse = USE,
    stop: Sequence[str] = (),
) -> Read:
    """How the gateway reads an answer in these pieces; what it reads of the whole answer is the same."""
    new_reader = with_calls(partial(reader_of, parser, use.names), use)
    assert new_reader is not None
    sequence, streamed = AnswerSequence(TextRequest("m", 10, stop=stop), 0, new_reader), StreamedCalls(use)
    reasons = [""] * (len(pieces) - 1) + [reason]
    deltas = [
        delta
        for text, reason in zip(pieces, reasons, strict=True)
        for delta in sequence.take(Piece(text=text, finish_reason=reason))
    ]
    taken = [streamed.take(delta) for delta in deltas]
    text, calls = "".join(delta.text for delta, _ in taken), merged([each for _, told in taken for each in told])
    given = "".join(delta.text for delta in deltas)
    assert split(use, given, deltas[-1].finish_reason or "", deltas[-1].stop_word) == (text, calls)
    return "".join(delta.reasoning for delta in deltas), text, calls, taken[-1][0].finish_reason


@pytest.mark.parametrize("form", FORMS)
def test_a_call_in_reasoning_that_is_not_closed_is_a_call(form: str) -> None:
    begun, thought = "<think>\nI <b>ask</b> <tool_call> it.", "I <b>ask</b> <tool_call> it."
    calls = split(USE, form, "stop")[1]
    assert calls
    assert all(call.name in USE.names and call.complete for call in calls)
    text = f"{begun}\n{form}"
    for at in range(len(text)):
        assert read([text[:at], text[at:]]) == (thought, "", calls, "tool_calls")
    assert read([*text]) == (thought, "", calls, "tool_calls")
    assert read([*text.removeprefix("<think>")], "deepseek-r1") == (thought, "", calls, "tool_calls")
    for pieces in ([text], [*text]):
        assert read(pieces, None) == ("", begun, calls, "tool_calls")


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_text_follows_in_reasoning_is_a_draft(form: str) -> None:
    thought = f"I could write {form}. But wait, the user"
    for reason in ("stop", "length"):
        for pieces in ([thought], [*thought]):
            assert read([f"<think>{pieces[0]}", *pieces[1:]], reason=reason) == (thought, "", [], reason)
            assert read(pieces, "deepseek-r1", reason) == (thought, "", [], reason)
            assert read(["<think>", *pieces], None, reason) == ("", f"<think>{thought}", [], reason)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_in_reasoning_that_is_closed_is_a_draft(form: str) -> None:
    thought = f"I may write\n{form} or\n{form}"
    for said in ("", "It rains.", f"It rains.\n{HERMES}"):
        text, calls = f"<think>{thought}\n</think>\n\n{said}", [CALL] if HERMES in said else []
        reason = "tool_calls" if calls else "stop"
        for pieces in ([text], [*text], [text[start : start + 7] for start in range(0, len(text), 7)]):
            assert read(pieces) == (thought, said.removesuffix(f"\n{HERMES}"), calls, reason)
            told = f"<think>{thought}\n</think>\n\n{said}".removesuffix(f"\n{HERMES}")
            assert read(pieces, None) == ("", told, calls, reason)


@pytest.mark.parametrize(("begin", "end"), [("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")])
def test_drafts_between_other_tags_of_reasoning_are_drafts(begin: str, end: str) -> None:
    thought = f"I may write {SEED} or </think>"
    calls = split(USE, SEED, "stop")[1]
    for pieces in (f"{begin}{thought}{end}", [f"{begin}{thought}{end}"]):
        assert read([*pieces]) == (thought, "", [], "stop")
        assert read([*pieces], None) == ("", f"{begin}{thought}{end}", [], "stop")
        assert read([*pieces, SEED]) == (thought, "", calls, "tool_calls")


DOTS = f"<tool_call>{AS_JSON.replace(ARGUMENTS, '{...}')}</tool_call>"
BREAKS_OFF = HERMES.partition(' York"')[0]
MANY = f" or {HERMES * 40}"
QUOTED = f"use <tool_call> as in {HERMES} or\n{BREAKS_OFF}" + " <tool_call>" * 60
OF_CODER = "\n</parameter>\n</function>\n</tool_call>"
QUOTES = f"<tool_call>\n<function=weather>\n<parameter=city>\n{QUOTED}{OF_CODER}"
"""A call with calls in its argument."""


@pytest.mark.parametrize(
    ("thought", "reasoning", "text", "calls"),
    [
        (f"So. {HERMES}\nI wait. ", f"So. {HERMES}\nI wait.", "", []),
        (f"So. {HERMES}. But wait, I", f"So. {HERMES}. But wait, I", "", []),
        (f"So. {HERMES} or\n{CODER}\n{HERMES}\n", f"So. {HERMES} or", "", [CALL, CALL]),
        (f"So. {HERMES}\n{CODER}", "So.", "", [CALL, CALL]),
        (f"{HERMES}", "", "", [CALL]),
        (f"So. {HERMES.replace('weather', 'rain')} So.", f"So. {HERMES.replace('weather', 'rain')} So.", "", []),
        (f"So. {DOTS}", f"So. {DOTS}", "", []),
        (f"So. {DOTS} or\n{HERMES}", f"So. {DOTS} or", "", [CALL]),
        (f"So. {BREAKS_OFF}", f"So. {BREAKS_OFF}", "", []),
        (f"So. {HERMES} {BREAKS_OFF}", "So.", "", [CALL, ToolCall("weather", '{"city": "New', complete=False)]),
        (f"So. {HERMES}\n{DOTS}", f"So. {HERMES}\n{DOTS}", "", []),
        (f"So. {DOTS * 40}{HERMES}", f"So. {DOTS * 40}", "", [CALL]),
        (f"So. {HERMES}{MANY}", f"So. {HERMES} or", "", [CALL] * 40),
        (f"So. {HERMES}<tool_call>\n{{", "So.", "<tool_call>\n{", [CALL]),
        (f"So. {HERMES.removesuffix('_call>')}", "So.", "\n</tool", [CALL]),
        (f"So. {QUOTES}", "So.", "", [ToolCall("weather", json.dumps({"city": QUOTED}))]),
        (f"So. {QUOTES.removesuffix(OF_CODER)}", f"So. {QUOTES.removesuffix(OF_CODER)}", "", []),
        ("So <tool_call> and <tool_call>{", "So <tool_call> and <tool_call>{", "", []),
        (AS_JSON, AS_JSON, "", []),
        (f"So. {HERMES}</thi", f"So. {HERMES}</thi", "", []),
        (f"So. {HERMES.replace('New', '</think>')}", None, None, []),
    ],
)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_reasoning_that_is_not_closed_ends_before_the_calls_that_end_it(
    thought: str, reasoning: str | None, text: str | None, calls: Sequence[ToolCall], reason: str
) -> None:
    if reasoning is None or text is None:  # the first closing tag counts, as without calls
        before, _, after = thought.partition("</think>")
        reasoning, text = before, after
    asks = "tool_calls" if calls and reason == "stop" else reason
    for pieces in ([f"<think>{thought}"], [*f"<think>{thought}"]):
        assert read(pieces, reason=reason) == (reasoning, text, calls, asks)


def test_a_stop_string_may_end_reasoning_after_a_call() -> None:
    text = f"<think>So. {HERMES}\n{HERMES}"
    cut = ToolCall("weather", '{"city": "New', complete=False)
    assert read([*text], stop=("</tool_call>\n<",)) == ("So.", "", [CALL], "tool_calls")
    first = text.replace(" York", " Delhi", 1)
    assert read([*first], stop=(" Delhi",)) == (f"So. {BREAKS_OFF}", "", [], "stop")
    second = text[: text.rindex(" York")] + " Delhi"
    assert read([*second], stop=(" Delhi",)) == ("So.", "", [CALL, cut], "stop")


def test_only_one_call_of_unclosed_reasoning_if_several_are_not_allowed() -> None:
    use = ToolUse("auto", USE.names, False, USE.schemas)
    assert read([*f"<think>So. {HERMES}\n{CODER}"], use=use) == ("So.", "", [CALL], "tool_calls")


def test_reasoning_is_held_back_from_the_beginning_of_a_call_on() -> None:
    new_reader = with_calls(partial(reader_of, "qwen3", USE.names), USE)
    assert new_reader is not None
    reader = new_reader(None)
    pieces = [
        "<think>I ",
        "ask <tool",
        '_call> {"name": "ti',
        'me", "arg',
        'uments": {}}',
        "</tool_call> a",
        " b",
        "</think>",
    ]
    told = [reader.parts(piece, None) for piece in pieces]
    draft = ' <tool_call> {"name": "time", "arguments": {}}</tool_call> a b'
    assert told == [[("I", "")], [(" ask", "")], *[[("", "")]] * 5, [(draft, "")]]
    reader = new_reader(None)
    told = [reader.parts(piece, None) for piece in ("<think>", "<function=ra", "in>", " it <tool_call> or", " not")]
    assert told == [[("", "")], [("<function=ra", "")], [("in>", "")], [(" it <tool_call> or", "")], [(" not", "")]]


PARTS = [
    *FORMS,
    DOTS,
    BREAKS_OFF,
    "<think>",
    "[THINK]",
    "<seed:think>",
    "</seed:think>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|channel>thought\n",
    "<channel|>",
    "</think>",
    "</th",
    "ink>",
    "[/THINK]",
    "<tool_call>",
    "{",
    "So.",
]
PARTS += ["</tool_call>", "\n", " ", "<", "<function=weather>", AS_JSON, '"arguments": {}}', "[TOOL_CALLS]", " " * 300]


@given(
    parser=st.sampled_from([None, "qwen3", "deepseek-r1"]),
    parts=st.lists(st.sampled_from(PARTS), max_size=8),
    sizes=st.lists(st.sampled_from([1, 3, 40, 200]), min_size=1, max_size=9),
    reason=st.sampled_from(["stop", "length"]),
)
@example(parser="qwen3", parts=["<think>", DOTS, "\n", GLM], sizes=[1] * 400, reason="stop")
def test_a_stream_is_read_as_the_whole_answer(
    parser: ReasoningParser | None, parts: list[str], sizes: list[int], reason: str
) -> None:
    text = "".join(parts)
    ends = [end for end in accumulate(sizes) if end < len(text)] + [len(text)]
    pieces = [text[start:end] for start, end in zip((0, *ends), ends, strict=False)]
    assert read(pieces, parser, reason) == read([text], parser, reason)


@pytest.mark.parametrize(
    ("drafts", "calls"),
    [
        (f"I may write {HERMES} or " * 900, ""),
        (f"{BREAKS_OFF} and " * 900, ""),
        (f"<function=weather>\n<parameter=city>\n{BREAKS_OFF}" * 900, ""),
        ("<function=weather>\n<parameter=city>\n" * 2000, ""),
        ("<tool_call>" * 9000, ""),
        ("<tool_call> " * 9000 + ".", CODER),
        (f"{HERMES} or " * 500, HERMES * 500),
        (DOTS * 500, f"{HERMES}\n" * 500),
        (BREAKS_OFF * 500, CODER * 500),
        ("So. " * 20_000, DEEPSEEK * 100),
        ("So. " * 20_000, f"{DEEPSEEK}{BREAKS_OFF}"),
        ("", f"<tool_calls>[{AS_JSON}{f', {AS_JSON}' * 900}]"),
    ],
    ids=range(12),
)
def test_little_is_read_to_find_the_calls_that_end_a_text(
    drafts: str, calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, push = list[int](), CallReader.push

    def counted(reader: CallReader, text: str, reason: str | None, stop_word: str = "") -> Sequence[str | CallDelta]:
        sizes.append(len(text))
        return push(reader, text, reason, stop_word)

    monkeypatch.setattr(CallReader, "push", counted)
    text = drafts + calls
    assert final_calls(text, USE, "") == (len(drafts) if calls else None)
    assert sum(sizes) <= 2 * len(text) + 100_000
    assert len(sizes) <= 8000


def test_clients_get_a_call_of_reasoning_that_is_not_closed() -> None:
    text = '<think>It asks.\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    time = {"name": "time", "parameters": {"type": "object", "properties": {}}}
    tools: Any = [{"type": "function", "function": time}]
    with thinking(text) as (gateway, _):
        asked = chat(text, tools=tools)
        choice = gateway.post("chat/completions", **asked).json()["choices"][0]
        chunks = [event["choices"][0] for event in events(gateway.post("chat/completions", **asked, stream=True))]
        response: dict[str, Any] = {"model": "demo", "input": "So?", "max_output_tokens": asked["max_tokens"]}
        response["tools"] = [{"type": "function", "strict": False, **time}]
        whole = response_of(gateway.post("responses", **response))
        streamed = response_events(gateway.post("responses", **response, stream=True))
        without = gateway.post("chat/completions", **chat(text)).json()["choices"][0]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"], message["reasoning_content"]) == (
        "tool_calls",
        None,
        "It asks.",
    )
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "time", "arguments": "{}"}]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "It asks."
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert call["function"] == {"name": "time", "arguments": "{}"}
    for output in (whole.output, streamed[-1].response.output):  # type: ignore[union-attr]
        assert [item.type for item in output] == ["reasoning", "function_call"]
    assert json.loads(whole.output[1].arguments) == {}  # type: ignore[union-attr]
    assert without["message"]["reasoning_content"] == text.removeprefix("<think>")
    assert (without["message"]["content"], without["finish_reason"]) == ("", "stop")
