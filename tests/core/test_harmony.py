"""Harmony, the form of gpt-oss: channels are told apart, wherever the stream is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.conftest import DEMO_MODEL
from trtforge.core.detokenizer import Detokenizer, special_ids
from trtforge.core.harmony import TOKENS, HarmonyText
from trtforge.core.token_texts import TokenTexts

THINKS = "<|channel|>analysis<|message|>2 and 2.<|end|>"
ANSWERS = "<|start|>assistant<|channel|>final<|message|>Four."
CALLS = (
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
)
HEAD = "<|channel|>commentary to=functions.weather<|message|>"
CALL = f'{HEAD}{{"city": "Rome"}}'


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (THINKS + ANSWERS, "2 and 2.", "Four."),
        (f"{THINKS}{ANSWERS}<|return|>", "2 and 2.", "Four."),
        (THINKS, "2 and 2.", ""),
        (f"{THINKS}<|start|>assistant{THINKS}{ANSWERS}", "2 and 2.\n2 and 2.", "Four."),
        ("<|channel|>final<|message|> Four. <", "", " Four. <"),
        ("<|channel|>commentary<|message|>I ask.<|end|>" + CALLS, "", f"I ask.{CALL}<|call|>"),
        (THINKS + CALLS.removesuffix("<|call|>"), "2 and 2.", CALL),
        (CALLS.removeprefix("<|start|>assistant") + CALLS, "", f"{CALL}<|call|>" * 2),
        (' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}', "", CALL),
        (THINKS + CALLS.replace("weather", "other"), "2 and 2.", f"{CALL}<|call|>".replace("weather", "other")),
        (THINKS + CALLS.replace("functions.", ""), "2 and 2.", f"{CALL}<|call|>"),
        (' to=weather<|channel|>analysis code<|message|>{"city": "Rome"}', "", CALL),
        (THINKS + CALLS.replace("functions.weather", "other"), '2 and 2.\n{"city": "Rome"}', ""),
        (THINKS + CALLS.replace("functions.", "tools."), '2 and 2.\n{"city": "Rome"}', ""),
        (CALLS.removeprefix("<|start|>assistant").replace('{"city": "Rome"}', " "), "", f"{HEAD}{{}}<|call|>"),
        ("<|channel|>analysis to=python code<|message|>2 + 2<|call|>", "2 + 2", ""),
        ("<|channel|>commentary to=browser.search<|message|>{}<|call|>" + ANSWERS, "{}", "Four."),
        ("<|channel|>final", "", "<|channel|>final"),
        ("<|channel|> is the token that begins a channel.", "", "<|channel|> is the token that begins a channel."),
        (" to=functions.weather is a name", "", " to=functions.weather is a name"),
        (f"{THINKS}<|start|>assist", "2 and 2.", ""),
        (f"{THINKS}<|start|>assistant<|channel|>fin", "2 and 2.", ""),
        (f"{THINKS}Four.", "2 and 2.", "Four."),
        (f"{THINKS}<|start|>user says", "2 and 2.", ""),
        (f"{THINKS}<|start|>{'user ' * 70}", "2 and 2.", f"<|start|>{'user ' * 70}"),
        ("Four.", "", "Four."),
        ("a <|channel|>final<|message|>", "", "a <|channel|>final<|message|>"),
        ("<|chan", "", "<|chan"),
        (" to", "", " to"),
        ("", "", ""),
    ],
)
def test_channels_are_told_apart(text: str, reasoning: str, content: str) -> None:
    assert HarmonyText(["weather"]).push(text, last=True) == (reasoning, content)


def test_parts_have_the_order_in_which_they_were_written() -> None:
    parts = HarmonyText(["weather"]).parts(f"{THINKS}{CALLS}<|start|>assistant{THINKS}{ANSWERS}", "stop")
    assert parts == [
        ("2 and 2.", ""),
        ("", CALL),
        ("", "<|call|>"),
        ("\n", ""),
        ("2 and 2.", ""),
        ("", "Four."),
    ]


def test_a_call_that_is_cut_before_its_arguments_is_none() -> None:
    cut = CALLS[: CALLS.index("{")].removeprefix("<|start|>assistant")
    assert HarmonyText(["weather"]).parts(cut, "length") == []
    assert HarmonyText(["weather"]).parts(cut, "stop") == [("", f"{HEAD}{{}}")]
    assert HarmonyText(["weather"]).parts(cut, "stop", '{"city"') == []
    assert HarmonyText(["weather"]).parts(cut, "stop", "<|call|>") == [("", f"{HEAD}{{}}")]


PARTS = [
    THINKS,
    ANSWERS,
    CALLS,
    CALLS.replace("functions.", ""),
    CALLS.replace("weather", "other"),
    *sorted(TOKENS),
    "assistant",
    " to=functions.weather",
    "<",
    "|>",
    "final",
    "a",
    "\n",
]


@given(parts=st.lists(st.sampled_from([*PARTS, "b " * 200]), max_size=8), size=st.integers(1, 9))
def test_pieces_of_any_size_give_the_same(parts: list[str], size: int) -> None:
    text = "".join(parts)
    reader = HarmonyText(["weather"])
    told = [reader.push(text[start : start + size]) for start in range(0, len(text), size)]
    told.append(reader.push("", last=True))
    assert tuple(map("".join, zip(*told, strict=True))) == HarmonyText(["weather"]).push(text, last=True)


def test_a_channels_text_comes_as_it_is_written() -> None:
    reader = HarmonyText()
    pieces = [
        "<|channel|>",
        "analysis",
        "<|message|>",
        "2 and",
        " 2.",
        "<|end|>",
        "<|start|>",
        "assistant",
        "<|channel|>",
    ]
    told = [reader.push(piece) for piece in [*pieces, "final", "<|message|>", "Fo", "ur."]]
    assert [each for each in told if any(each)] == [("2 and", ""), (" 2.", ""), ("", "Fo"), ("", "ur.")]


def test_the_tokens_of_harmony_are_part_of_an_answers_text() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    without = special_ids(tokenizer)
    tokenizer.add_special_tokens([*sorted(TOKENS), "<|endoftext|>"])
    ids = tokenizer.encode(f"{THINKS}{ANSWERS}<|endoftext|>", add_special_tokens=False).ids
    one = Detokenizer(tokenizer, context=tokenizer.encode("<|start|>assistant", add_special_tokens=False).ids)
    assert one.push(ids) + one.flush() == THINKS + ANSWERS
    names = {tokenizer.id_to_token(token) for token in special_ids(tokenizer)}
    assert names == {tokenizer.id_to_token(token) for token in without} - TOKENS | {"<|endoftext|>"}
    texts = TokenTexts(tokenizer)
    assert b"".join(bytes(texts.of(token)[1]) for token in ids).decode() == THINKS + ANSWERS
    alone = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    alone.add_special_tokens(["<|start|>", "<|end|>"])
    assert {"<|start|>", "<|end|>"} < {alone.id_to_token(token) for token in special_ids(alone)}
