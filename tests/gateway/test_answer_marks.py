"""Marks around the text of answers of Command, functionary, Hunyuan and ERNIE: clients do not see them."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.test_call_forms import APRIEL, ROME, TIME, USE
from tests.gateway.test_later_call_forms import COHERE, KIMI
from tests.gateway.test_tools import merged
from trtforge.core.call_tags import RECIPIENT
from trtforge.core.reasoning import ReasoningParser, prompted_thought, reader_of
from trtforge.gateway.sequence import Delta
from trtforge.gateway.thought_calls import with_calls
from trtforge.gateway.tool_calls import StreamedCalls, ToolCall
from trtforge.gateway.tools import ToolUse

HUNYUAN = "<think>\nI ask.\n</think>\n<answer>\n"
PLAN = "<|START_THINKING|>I ask.<|END_THINKING|>"


def read(
    pieces: Sequence[str],
    prompted: str,
    parser: ReasoningParser | None = "qwen3",
    use: ToolUse | None = USE,
    *,
    continues: bool = False,
    asked: str = "",
) -> tuple[str, str, Sequence[ToolCall]]:
    """Reasoning, text and calls of an answer to a prompt that ends so."""
    names = () if use is None else use.names
    new_reader = with_calls(partial(reader_of, parser, names), use, continues=continues, asked=asked)
    assert new_reader is not None
    reader, calls = new_reader(prompted), None if use is None else StreamedCalls(use)
    reasoning, said, told = "", "", []
    for number, piece in enumerate(pieces):
        reason = "stop" if number == len(pieces) - 1 else None
        parts = reader.parts(piece, reason)
        for index, (thought, text) in enumerate(parts):
            reasoning += thought
            if calls is None:
                said += text
                continue
            delta, new = calls.take(Delta(0, text, reason if index == len(parts) - 1 else None))
            said += delta.text
            told += new
    return reasoning, said, merged(told)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("answer", "prompted", "expected"),
    [
        ("<|START_RESPONSE|>It rains.<|END_RESPONSE|>", "", ("", "It rains.", [])),
        (f"{PLAN}<|START_RESPONSE|>It rains.<|END_RESPONSE|>", "", ("I ask.", "It rains.", [])),
        (f"{PLAN}\n<|START_TEXT|>It rains.<|END_TEXT|>", "", ("I ask.", "It rains.", [])),
        (f"{PLAN}{COHERE}", "", ("I ask.", "", [ROME, TIME])),
        (f"{PLAN}{COHERE}", "<|START_THINKING|>", ("I ask.", "", [ROME, TIME])),
        (
            "I ask.<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|><|close|>message<|sep|>",
            "<|open|>think<|sep|>",
            ("I ask.", "So.", []),
        ),
        (
            f"So.<|close|>response<|sep|>{KIMI}<|close|>message<|sep|>",
            "<|open|>response<|sep|>",
            ("", "So.", [ROME, TIME]),
        ),
        (f"<|open|>think<|sep|>I ask.<|close|>think<|sep|>{KIMI}", "", ("I ask.", "", [ROME, TIME])),
        ("The tag <|START_RESPONSE|> is", "", ("", "The tag <|START_RESPONSE|> is", [])),
        ("<|START_", "", ("", "<|START_", [])),
        ("all\nIt rains.", ">>>", ("", "It rains.", [])),
        ('weather\n{"city": "Rome", "days": 3}>>>time\n{}', ">>>", ("", "", [ROME, TIME])),
        ('all\nI ask.>>>weather\n{"city": "Rome", "days": 3}', ">>>", ("", "I ask.", [ROME])),
        ("python\nprint(1)", ">>>", ("", ">>>python\nprint(1)", [])),
        ("all\n1 >> 2 >>> 3 >>>", ">>>", ("", "1 >> 2 >>> 3 >>>", [])),
        ("all\nIt rains.", "", ("", "all\nIt rains.", [])),
        ("all\n>>>>all\n>>all\n", ">>>", ("", ">>>all\n", [])),
        ("<|START_TEXT|><|START_<|START_TEXT|>TEXT|>", "", ("", "<|START_TEXT|>", [])),
        (f"{HUNYUAN}Hello\n</answer>", "", ("I ask.", "Hello", [])),
        (f"{HUNYUAN}a\n\nb \n</answer>\n ", "", ("I ask.", "a\n\nb ", [])),
        (f"{HUNYUAN}Hello", "", ("I ask.", "Hello", [])),
        (f"{HUNYUAN}Hello\n</ans", "", ("I ask.", "Hello\n</ans", [])),
        (f"{HUNYUAN}The </answer> ends it.\n</answer>", "", ("I ask.", "The </answer> ends it.", [])),
        (f"{HUNYUAN}Hello\n</answer> So.", "", ("I ask.", "Hello\n</answer> So.", [])),
        (f"{HUNYUAN}{APRIEL}\n</answer>", "", ("I ask.", "", [ROME, TIME])),
        (f"{HUNYUAN}I look.\n{APRIEL}\n</answer>", "", ("I ask.", "I look.", [ROME, TIME])),
        (f"<think>\n\n</think>\n<answer>\n{APRIEL}\n</answer>", "", ("", "", [ROME, TIME])),
        (f"{HUNYUAN}</answer>", "", ("I ask.", "", [])),
        ("<think>I ask.</think>\n<answ", "", ("I ask.", "<answ", [])),
        ("<think>I ask.</think>So: <answer>1</answer>", "", ("I ask.", "So: <answer>1</answer>", [])),
        ("<think>I ask.</think><response>1</answer>", "", ("I ask.", "1</answer>", [])),
        ("I ask.\n</think>\n\n<response>\nHello\n</response>\n", "<think>", ("I ask.", "Hello", [])),
        ("I ask.\n</think>\nHello", "<think>", ("I ask.", "Hello", [])),
        ("<answer>\nHello\n</answer>", "", ("", "<answer>\nHello\n</answer>", [])),
    ],
)
def test_an_answer_has_no_marks(
    answer: str, prompted: str, expected: tuple[str, str, Sequence[ToolCall]], size: int
) -> None:
    pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
    assert read(pieces, prompted) == expected


def test_marks_are_removed_without_functions_and_without_a_parser() -> None:
    assert read(["all\nIt rains."], ">>>", None, None) == ("", "It rains.", [])
    assert read(["time\n{}"], ">>>", None, None) == ("", ">>>time\n{}", [])
    assert read([f"{PLAN}<|START_RESPONSE|>It rains.<|END_RESPONSE|>"], "", None) == ("", f"{PLAN}It rains.", [])
    thought = "I ask.<|close|>think<|sep|>"
    answer = f"{thought}<|open|>response<|sep|>So.<|close|>response<|sep|><|close|>message<|sep|>"
    assert read([answer], "<|open|>think<|sep|>", None, None) == ("", f"{thought}So.", [])
    assert read([f"{HUNYUAN}So.\n</answer>"], "", "qwen3", None) == ("I ask.", "So.", [])
    assert read([f"{HUNYUAN}So.\n</answer>"], "", None, None) == ("", f"{HUNYUAN}So.\n</answer>", [])


def test_tags_that_the_conversation_has_stay_in_the_answer() -> None:
    text = "<answer>\n4\n</answer>"
    asked = "Reply within <answer></answer>."
    for size in (1, 3, 1000):
        written = f"<think>2 + 2</think>\n\n{text}"
        pieces = [written[start : start + size] for start in range(0, len(written), size)]
        assert read(pieces, "", asked=asked) == read(pieces, "", use=None, asked=asked) == ("2 + 2", text, [])
        assert read(pieces, "", asked="Reply within <response>.") == ("2 + 2", "4", [])


def test_marks_with_which_a_continued_message_ends_are_its_text() -> None:
    assert read(["1 + 1"], ">>>", None, None, continues=True) == ("", "1 + 1", [])
    assert read(["all\nIt rains."], ">>>", continues=True) == ("", "all\nIt rains.", [])


def test_a_prompt_may_end_with_the_mark_of_a_recipient() -> None:
    assert prompted_thought("<|start_header_id|>assistant<|end_header_id|>\n\n>>>") == RECIPIENT


PARTS = [
    PLAN,
    COHERE,
    KIMI,
    "<|open|>think<|sep|>",
    "<|close|>response<|sep|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|START_TEXT|>",
    "It rains.",
    ">",
    ">>",
    ">>>",
    "all\n",
]
PARTS += [HUNYUAN, "<think>", "</think>", "<answer>", "</answer>", "<response>", "</response>", "\n\n", "</answer"]
PARTS += ["weather\n", "time\n", "{}", '{"city": "Rome"}', "\n", " ", "<|START_", "RESPONSE|>", "python\n", "a" * 70]


@given(
    parts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=9),
    sizes=st.lists(st.sampled_from([1, 3, 40]), min_size=1, max_size=9),
    prompted=st.sampled_from(["", ">>>", "<|open|>response<|sep|>", "<|START_THINKING|>"]),
    parser=st.sampled_from([None, "qwen3"]),
    use=st.sampled_from([None, USE]),
)
def test_pieces_are_read_as_the_whole_answer(
    parts: list[str], sizes: list[int], prompted: str, parser: ReasoningParser | None, use: ToolUse | None
) -> None:
    text = "".join(parts)
    ends = [end for end in accumulate(sizes) if end < len(text)] + [len(text)]
    pieces = [text[start:end] for start, end in zip((0, *ends), ends, strict=False)]
    assert read(pieces, prompted, parser, use) == read([text], prompted, parser, use)
