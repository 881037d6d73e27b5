"""Streamed text: whatever the steps, the pieces together are the text of all tokens."""

import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.conftest import DEMO_MODEL
from trtforge.core.detokenizer import Detokenizer, special_ids

TEXTS = [
    "Hello world, this is it.",
    "naïve café",
    "日本語のテキスト 한국어",
    "🙂🙃 👩‍👩‍👧 done",
    "a  b\n\n c\t",
    "¥€£ «x»",
]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: bytes, so that a character may lie across tokens."""
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def metaspace() -> Tokenizer:
    """As Llama 2 and Mistral: SentencePiece BPE with bytes for unknown characters; a first space is dropped."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyzHTD,.0123456789", "▁the", "▁world", "▁is", "llo", "▁He", "it"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "H"), ("▁H", "e"), ("l", "l"), ("ll", "o"), ("i", "t")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def unigram() -> Tokenizer:
    """As T5: Metaspace before and after."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    )
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "metaspace": metaspace(), "unigram": unigram()}


def stream(tokenizer: Tokenizer, steps: list[list[int]], context: tuple[int, ...] = ()) -> list[str]:
    """The pieces that come when each of `steps` is pushed at once."""
    one = Detokenizer(tokenizer, context)
    return [*(one.push(step) for step in steps), one.flush()]


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """`ids` in steps of these sizes, the last size again and again."""
    steps = []
    while ids:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        steps.append(ids[:size])
        ids = ids[size:]
    return steps


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=80)),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=20),
)
def test_pieces_make_the_text_of_all_tokens(name: str, text: str, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text).ids
    pieces = stream(tokenizer, cut(ids, list(sizes)))
    assert "".join(pieces) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 2047), max_size=120), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=9))
def test_any_byte_level_ids_make_the_text_of_all_tokens(ids: list[int], sizes: list[int]) -> None:
    """Also ids that no text has: stray bytes, special tokens in the middle."""
    tokenizer = TOKENIZERS["byte_level"]
    assert "".join(stream(tokenizer, cut(ids, list(sizes)))) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 290), max_size=40), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=9))
@example(ids=[3 + 0x41, 3 + 0xC3, 260], sizes=[2])
def test_bytes_make_the_same_text_however_they_come(ids: list[int], sizes: list[int]) -> None:
    """A byte that fits no character makes those before it invalid, of which some were returned."""
    tokenizer = TOKENIZERS["metaspace"]
    assert "".join(stream(tokenizer, cut(ids, list(sizes)))) == "".join(stream(tokenizer, [[i] for i in ids]))


@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
def test_no_piece_holds_half_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("a🙂b日c").ids
    pieces = stream(tokenizer, [[i] for i in ids])
    assert not any("\ufffd" in piece for piece in pieces)
    assert "🙂" in "".join(pieces)
    assert "" in pieces


def test_bytes_that_never_become_a_character_come_at_the_end() -> None:
    tokenizer = TOKENIZERS["metaspace"]
    half = [tokenizer.token_to_id("<0xF0>"), tokenizer.token_to_id("<0x9F>")]
    assert stream(tokenizer, [[i] for i in half]) == ["", "", "\ufffd\ufffd"]


class Counting:
    """A tokenizer that keeps the length of the longest ids that it decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.longest = tokenizer, 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(ids))
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def get_added_tokens_decoder(self) -> Any:
        return self._tokenizer.get_added_tokens_decoder()


STRAY = {
    "the first byte of a character": ("byte_level", TOKENIZERS["byte_level"].encode("🙂").ids[:1]),
    "all bytes of a character but the last": ("byte_level", TOKENIZERS["byte_level"].encode("🙂").ids[:-1]),
    "a byte": ("metaspace", [3 + 0x80]),
    "bytes among characters": ("metaspace", [3 + byte for byte in b"\xe4\xbd\xa0\x80\xf0\x9f"]),
    "special tokens": ("metaspace", [1]),
}


@pytest.mark.parametrize("what", STRAY)
def test_tokens_that_form_no_character_take_no_longer_the_more_there_are(what: str) -> None:
    """Each step decodes a window, which must not grow with them."""
    name, some = STRAY[what]
    ids = some * 300
    counting = Counting(TOKENIZERS[name])
    pieces = stream(counting, [[i] for i in ids])  # type: ignore[arg-type]
    assert counting.longest <= 100
    if what != "bytes among characters":  # the first of these were returned before they became invalid
        assert "".join(pieces) == TOKENIZERS[name].decode(ids)
    assert len("".join(pieces[:-1])) >= len("".join(pieces)) - 40


@pytest.mark.parametrize("name", TOKENIZERS)
def test_context_gives_the_space_between_prompt_and_answer(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    prompt, whole = tokenizer.encode("Hello").ids, tokenizer.encode("Hello world").ids
    assert whole[: len(prompt)] == prompt
    assert "".join(stream(tokenizer, [[i] for i in whole[len(prompt) :]], tuple(prompt))) == " world"


def test_tokens_that_divide_the_answers_of_mistral_are_part_of_the_text() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    text = '[THINK]a[/THINK]b[TOOL_CALLS]weather[CALL_ID]ABCdef123[ARGS]{"city": "Rome"}'
    names = ["[INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"]
    tokenizer.add_special_tokens(names)
    ids = tokenizer.encode(f"[INST]{text}[INST]", add_special_tokens=False).ids
    assert Detokenizer(tokenizer).push(ids) == text
    special = {tokenizer.id_to_token(token) for token in special_ids(tokenizer)}
    assert special.intersection(names) == {"[INST]"}
    other = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    other.add_special_tokens(["[ARGS]"])
    assert "[ARGS]" in {other.id_to_token(token) for token in special_ids(other)}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("<|tool_call_start|>[f(a=1)]<|tool_call_end|>", ["<|tool_call_start|>", "<|tool_call_end|>"]),
        (
            '<|channel>thought\na<channel|><|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|>',
            ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'],
        ),
        ("<|open|>think<|sep|>a<|close|>think<|sep|>", ["<|open|>", "<|close|>", "<|sep|>"]),
        (
            "<|START_THINKING|>a<|END_THINKING|><|START_ACTION|>[]<|END_ACTION|>",
            ["<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"],
        ),
    ],
)
def test_tokens_around_calls_are_part_of_the_text(text: str, names: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([*names, "<|tool_response>"])
    ids = tokenizer.encode(f"{text}<|tool_response>", add_special_tokens=False).ids
    assert Detokenizer(tokenizer).push(ids) == text


@pytest.mark.parametrize("name", ["<|channel>", "<|tool_call>", "<|open|>", "<|sep|>", '<|"|>'])
def test_a_token_that_is_only_a_part_of_a_tag_gives_no_text_alone(name: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([name])
    assert name in {tokenizer.id_to_token(token) for token in special_ids(tokenizer)}


@pytest.mark.parametrize(
    "text",
    [
        'I look.<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>',
        'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>\n</tool_call>",
        "<think>a</think>b",
        "a</think>b",
        "<function_calls>\nf()\n</function_calls>",
        '<|inner_prefix|>a<|inner_suffix|><|tools_prefix|>[{"f": {}}]<|tools_suffix|>',
        "<|tool_call_start|>[f(a=1)]",
    ],
)
def test_special_tokens_that_are_tags_of_calls_or_reasoning_are_part_of_the_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([*re.findall(r"<[^<>]+>", text), "<|python_start|>"])
    ids = tokenizer.encode(f"{text}<|python_start|>", add_special_tokens=False).ids
    assert Detokenizer(tokenizer).push(ids) == text


def test_tokenizers_without_tags_have_the_same_special_tokens_as_before() -> None:
    for tokenizer in TOKENIZERS.values():
        added = tokenizer.get_added_tokens_decoder().items()
        assert special_ids(tokenizer) == {token for token, added_token in added if added_token.special}
