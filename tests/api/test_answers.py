"""Text and counts of the Python API, of tokens as they come."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.conftest import DEMO_MODEL
from tests.core.test_detokenizer import TOKENIZERS
from tests.runtime.test_grammars import sentencepiece
from trtforge import SamplingParams
from trtforge.api.answers import Answer, Assembly
from trtforge.api.prompts import Prompts
from trtforge.core.token_texts import TokenTexts
from trtforge.engine_process.requests import GenerationRequest, Output


def answer(tokenizer: Tokenizer, prompt: list[int], tokens: list[int], *, continues: bool = True) -> Answer:
    """What becomes of an output in single tokens."""
    request, texts = GenerationRequest("a", tuple(prompt), 100), TokenTexts(tokenizer)
    assembly = Assembly([request], (), texts, continues=continues)
    pieces = [piece for token in tokens for piece in assembly.take(Output("a", (token,), log_probs=(-1.0,)))]
    return assembly.answer([*pieces, *assembly.take(Output("a", (), "length"))])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=40), prompt=st.text(min_size=1, max_size=40))
def test_pieces_make_the_text_after_the_prompt(name: str, text: str, prompt: str) -> None:
    tokenizer = TOKENIZERS[name]
    before, tokens = tokenizer.encode(prompt).ids, tokenizer.encode(text).ids
    whole = tokenizer.decode([*before, *tokens])
    assert answer(tokenizer, before, tokens).text == whole[len(tokenizer.decode(before)) :]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=40), prompt=st.text(min_size=1, max_size=40))
def test_pieces_of_a_text_of_its_own_are_that_text(name: str, text: str, prompt: str) -> None:
    """As `transformers` decodes the tokens alone."""
    tokenizer = TOKENIZERS[name]
    before, tokens = tokenizer.encode(prompt).ids, tokenizer.encode(text).ids
    assert answer(tokenizer, before, tokens, continues=False).text == tokenizer.decode(tokens)


@pytest.mark.parametrize(("name", "first"), [("byte_level", "the"), ("metaspace", " the"), ("unigram", " the")])
def test_the_texts_of_scores_are_those_in_the_text(name: str, first: str) -> None:
    """SentencePiece's tokens begin with the space before a word, which the first of a text loses."""
    tokenizer = TOKENIZERS[name]
    before, tokens = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("Hello", "the world, it is"))
    made = answer(tokenizer, before, tokens)
    assert "".join(score.text for score in made.log_probs) == made.text == f"{first} world, it is"
    alone = answer(tokenizer, before, tokens, continues=False)
    assert "".join(score.text for score in alone.log_probs) == alone.text == "the world, it is"


def test_bytes_that_form_no_character_are_no_error() -> None:
    """`DecodeStream` of tokenizers calls them an invalid prefix."""
    tokenizer = TOKENIZERS["metaspace"]
    tokens = [tokenizer.token_to_id(name) for name in ("<0x41>", "<0xC3>", "▁the")]
    made = answer(tokenizer, tokenizer.encode("Hello").ids, tokens)
    assert made.text == "A\ufffd the"
    assert made.usage.completion_tokens == 3


def test_a_prompt_that_ends_within_a_character_is_not_part_of_the_answer() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    prompt = tokenizer.encode("a list 🙂").ids[:-1]
    assert answer(tokenizer, prompt, tokenizer.encode(" of", add_special_tokens=False).ids).text == " of"


def test_bad_words_have_their_tokens_within_a_text(tmp_path: Path) -> None:
    """A tokenizer of Llama 2's kind writes a space before each text, also before a line break alone."""
    tokenizer = sentencepiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    found = Prompts(tmp_path, 2048).request("a", SamplingParams(bad=["\n", "no"])).bad_words
    space, line, n, o = map(tokenizer.token_to_id, ("▁", "<0x0A>", "n", "o"))
    assert set(found) == {(space, line), (line,), (space, n, o), (space, space, n, o), (n, o)}


def test_a_prompt_is_neither_truncated_nor_padded(tmp_path: Path) -> None:
    """Tokenizers that were saved after training have both switched on."""
    whole = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    expected = tuple(whole.encode("Return the list of items").ids)
    whole.enable_truncation(3)
    whole.enable_padding(length=64)
    whole.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    request = Prompts(tmp_path, 2048).request("Return the list of items", SamplingParams(bad=["list"]))
    assert request.prompt == expected
    assert max(map(len, request.bad_words)) < 5
