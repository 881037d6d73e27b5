"""Reasoning is told from an answer, wherever the stream is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.core.reasoning import REASONING_PARSERS, ReasoningParser, ReasoningText, prompted_thought


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "content"),
    [
        ("deepseek-r1", "I add.\n</think>\n\nFour.", "I add.", "Four."),
        ("deepseek-r1", "<think>\nI add.\n</think>\n\nFour.", "I add.", "Four."),
        ("deepseek-r1", " \n<think> I add.", "I add.", ""),
        ("deepseek-r1", "</think>Four.", "", "Four."),
        ("deepseek-r1", "\n\n</think>\n\n  Four.\n", "", "  Four.\n"),
        ("deepseek-r1", "I add </thin", "I add </thin", ""),
        ("deepseek-r1", "I <think> so </think> a </think> b", "I <think> so", " a </think> b"),
        ("deepseek-r1", "", "", ""),
        ("qwen3", "<think>\n\n</think>\n\nFour.", "", "Four."),
        ("qwen3", "<think>\nI add.\n\nThen more.\n</think>\n\nFour.", "I add.\n\nThen more.", "Four."),
        ("qwen3", "\n\nFour.", "", "\n\nFour."),
        ("qwen3", "Four. <think>I add.</think>", "", "Four. <think>I add.</think>"),
        ("qwen3", "<thin", "", "<thin"),
        ("qwen3", "[THINK]I </think> add.[/THINK]Four.", "I </think> add.", "Four."),
        ("qwen3", "<seed:think>I </think> add.</seed:think>Four.", "I </think> add.", "Four."),
        ("deepseek-r1", "[THINK]I add.[/THIN", "I add.[/THIN", ""),
        ("deepseek-r1", "I [/THINK] add.</think>Four.", "I [/THINK] add.", "Four."),
        ("qwen3", "[TH", "", "[TH"),
        ("qwen3", "<think>I a", "I a", ""),
        ("qwen3", "  ", "", "  "),
        ("qwen3", "", "", ""),
    ],
)
def test_reasoning_and_answer_are_told_apart(parser: ReasoningParser, text: str, reasoning: str, content: str) -> None:
    assert ReasoningText(parser).push(text, last=True) == (reasoning, content)


@pytest.mark.parametrize("parser", REASONING_PARSERS)
@pytest.mark.parametrize(
    ("before", "text", "reasoning", "content"),
    [
        ("<think>", "I add.</think>Four.", "I add.", "Four."),
        ("<think>", "\n<think>I add.</think>Four.", "I add.", "Four."),
        ("[THINK]", "I </think> add.[/THINK]Four.", "I </think> add.", "Four."),
        ("<seed:think>", "I </think> add.</seed:think>Four.", "I </think> add.", "Four."),
        ("", "Four.</think>", "", "Four.</think>"),
        ("", "<think>I add.</think>Four.", "I add.", "Four."),
    ],
)
def test_what_is_before_an_answer_tells_whether_it_begins_with_reasoning(
    parser: ReasoningParser, before: str, text: str, reasoning: str, content: str
) -> None:
    assert ReasoningText(parser, before).push(text, last=True) == (reasoning, content)


@pytest.mark.parametrize(
    ("prompt", "tag"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>"),
        ("[/INST][THINK]", "[THINK]"),
        ("<seed:bos>assistant\n<seed:think>", "<seed:think>"),
        ("<|CHATBOT_TOKEN|><|START_THINKING|>", "<|START_THINKING|>"),
        ("<|turn>model\n<|channel>thought\n", "<|channel>thought"),
        ("<|turn>model\n<|channel>thought\n<channel|>", ""),
        ("<｜Assistant｜></think>", ""),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", ""),
        ("", ""),
    ],
)
def test_the_tag_with_which_a_prompt_ends(prompt: str, tag: str) -> None:
    assert prompted_thought(prompt) == tag


PARTS = (
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<seed:",
    "<seed:think>",
    "</seed:think>",
    "[",
    "<",
    "</",
    "think>",
    "\n",
    " ",
    "é",
    "a",
)


@given(
    st.sampled_from(REASONING_PARSERS),
    st.lists(st.sampled_from(PARTS), max_size=14).map("".join),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_a_stream_is_the_whole_answer(parser: ReasoningParser, text: str, cuts: list[int]) -> None:
    stream = ReasoningText(parser)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts)]
    pieces = [stream.push(text[start:end]) for start, end in pairwise(places)]
    pieces.append(stream.push(text[places[-1] :], last=True))
    joined = "".join(reasoning for reasoning, _ in pieces), "".join(content for _, content in pieces)
    assert joined == ReasoningText(parser).push(text, last=True)
    first = next((index for index, (_, content) in enumerate(pieces) if content), len(pieces))
    assert not any(reasoning for reasoning, _ in pieces[first + 1 :])
