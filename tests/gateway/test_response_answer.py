"""The stream of a response and its whole answer agree, wherever the pieces of the text begin."""

import json
import re
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.gateway.fake import score
from trtforge.gateway.generation import Choice, Usage
from trtforge.gateway.response_answer import ResponseAnswer
from trtforge.gateway.response_object import ResponseObject
from trtforge.gateway.sequence import Delta
from trtforge.gateway.tools import ToolUse

AUTO = ToolUse("auto", ("weather", "time"))
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'
ARRAY = '[{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "time", "arguments": {}}]'
USES = (None, AUTO, ToolUse("required", AUTO.names), ToolUse("named", ("weather",), several=False))
USAGE = Usage(3, 4)
_IDS = re.compile(r"(resp|msg|fc|rs|call)_[0-9a-f]{48}")


def answer(use: ToolUse | None) -> ResponseAnswer:
    return ResponseAnswer(ResponseObject("m", {"metadata": {}}), use)


def events_of(text: bytes) -> list[Any]:
    return [json.loads(event.split("\ndata: ")[1]) for event in text.decode().removesuffix("\n\n").split("\n\n")]


def alike(response: Any) -> Any:
    """Without what differs between two answers."""
    values = json.loads(_IDS.sub(r"\1", json.dumps(response)))
    return values | {"created_at": 0, "completed_at": values.get("completed_at") and 0}


def unscored(response: Any) -> Any:
    """Without the scores of its texts."""
    parts = [part for item in response["output"] for part in item.get("content", ())]
    for part in parts:
        part["logprobs"] = []
    return response


@given(
    use=st.sampled_from(USES),
    parts=st.lists(
        st.sampled_from(["So:", "\n", " é", "<tool_call>", "</tool_call>", "<tool", LLAMA, ARRAY]), max_size=6
    ),
    sizes=st.lists(st.sampled_from([1, 3, 200]), min_size=1, max_size=9),
    reason=st.sampled_from(["stop", "length"]),
    scored=st.booleans(),
)
@example(use=AUTO, parts=["So:", "<tool_call>", LLAMA], sizes=[3, 200], reason="stop", scored=True)
def test_a_stream_has_what_the_whole_answer_has(
    use: ToolUse | None, parts: list[str], sizes: list[int], reason: str, scored: bool
) -> None:
    text = "".join(parts)
    ends = [0, *(end for end in accumulate(sizes) if end < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(ends)]
    scores = [[score(piece, 2)] if scored else [] for piece in pieces]
    whole = json.loads(answer(use).whole([Choice([("", text)], reason, [*chain(*scores)])], USAGE))
    streaming = answer(use)
    reasons = [*[None] * (len(pieces) - 1), reason]
    sent = b"".join(streaming.events(Delta(0, *each)) for each in zip(pieces, reasons, scores, strict=True))
    events = events_of(sent + streaming.end(USAGE))
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    streamed = events[-1]["response"]
    calls = any(item["type"] == "function_call" for item in whole["output"])
    if calls:  # a stream tells scores of text as long as its message is written
        assert unscored(alike(streamed)) == unscored(alike(whole))
    else:
        assert alike(streamed) == alike(whole)
    assert events[-1]["type"] == f"response.{whole['status']}"
    check_items(events, events[-1]["response"]["output"])


@given(
    parts=st.lists(st.tuples(st.text("a \t", max_size=4), st.text("a \t", max_size=4)), max_size=3),
    sizes=st.lists(st.sampled_from([1, 2, 200]), min_size=1, max_size=9),
)
@example(parts=[("x", ""), ("", "   Hi")], sizes=[1] * 9)
def test_white_space_between_reasoning_and_text_is_left_out_however_it_comes(
    parts: list[tuple[str, str]], sizes: list[int]
) -> None:
    whole = json.loads(answer(None).whole([Choice(parts, "stop", [])], USAGE))
    streaming = answer(None)
    sent = b""
    for reasoning, text in parts:
        for kind, said in (("reasoning", reasoning), ("text", text)):
            ends = [0, *(end for end in accumulate(sizes) if end < len(said)), len(said)]
            for start, end in pairwise(ends):
                sent += streaming.events(Delta(0, **{kind: said[start:end]}))  # type: ignore[arg-type]
    sent += streaming.events(Delta(0, "", "stop"))
    events = events_of(sent + streaming.end(USAGE))
    assert alike(events[-1]["response"]) == alike(whole)
    for kind in ("output_text", "reasoning_text"):
        deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        done = [event["text"] for event in events if event["type"] == f"response.{kind}.done"]
        assert "".join(deltas) == "".join(done)


def check_items(events: Sequence[Any], output: Sequence[Any]) -> None:
    """Every item is announced, comes in pieces that make it up, and is done."""

    def of(kind: str, index: int) -> list[Any]:
        return [event for event in events if event["type"] == f"response.{kind}" and event["output_index"] == index]

    for index, item in enumerate(output):
        (added,), (done,) = of("output_item.added", index), of("output_item.done", index)
        assert (added["item"]["id"], added["item"]["status"], done["item"]) == (item["id"], "in_progress", item)
        if item["type"] == "function_call":
            pieces = [event["delta"] for event in of("function_call_arguments.delta", index)]
            assert "".join(pieces) == of("function_call_arguments.done", index)[0]["arguments"] == item["arguments"]
            continue
        (part,) = item["content"]
        deltas = of("output_text.delta", index)
        assert "".join(event["delta"] for event in deltas) == part["text"] == of("output_text.done", index)[0]["text"]
        named = [each["token"] for event in deltas for each in event["logprobs"]]
        assert named == [each["token"] for each in part["logprobs"]]
        assert of("content_part.added", index)[0]["part"]["text"] == ""
        assert of("content_part.done", index)[0]["part"] == part
    assert len([event for event in events if event["type"] == "response.output_item.added"]) == len(output)


def test_scores_of_what_is_held_back_come_with_the_text() -> None:
    streaming = answer(AUTO)
    first = streaming.events(Delta(0, "a <to", None, [score("a", 0), score(" <to", 0)]))
    assert streaming.events(Delta(0, "o", None, [score("o", 0)])) == b""
    last = streaming.events(Delta(0, "k", "stop", [score("k", 0)]))
    sent = [event for event in events_of(first + last) if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], [each["token"] for each in event["logprobs"]]) for event in sent] == [
        ("a", ["a", " <to"]),
        (" <took", ["o", "k"]),
    ]


def test_the_scores_of_a_whole_answer_are_those_of_its_first_text() -> None:
    scores = [score("a", 1), score("b", 1)]
    parts = [("I think.", ""), ("", "One."), ("\nAgain.", ""), ("", "Two.")]
    output = json.loads(answer(None).whole([Choice(parts, "stop", scores)], None))["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "reasoning", "message"]
    assert [item["content"][0]["text"] for item in output] == ["I think.", "One.", "Again.", "Two."]
    assert [len(item["content"][0].get("logprobs", [])) for item in output] == [0, 2, 0, 0]


@pytest.mark.parametrize("use", USES)
def test_an_empty_answer_is_a_message_without_text_unless_a_function_is_named(use: ToolUse | None) -> None:
    whole = json.loads(answer(use).whole([Choice([], "stop", [])], None))
    (item,) = whole["output"]
    if use is USES[3]:
        assert (item["type"], item["arguments"]) == ("function_call", "")
    else:
        assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
    assert (whole["status"], whole["usage"]) == ("completed", None)
