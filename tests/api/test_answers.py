"""Text and counts of the Python API, of tokens as they come."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.conftest import DEMO_MODEL
from tests.core.test_detokenizer import TOKENIZERS
from trtforge import SamplingParams
from trtforge.api.answers import Answer, Assembly, joined
from trtforge.api.prompts import Prompts
from trtforge.engine_process.requests import GenerationRequest, Output


def answer(tokenizer: Tokenizer, prompt: list[int], tokens: list[int], stop: tuple[str, ...] = ()) -> Answer:
    """What becomes of an output in single tokens."""
    assembly = Assembly(GenerationRequest("a", tuple(prompt), 100), stop, tokenizer, 16)
    pieces = [assembly.take(Output("a", (token,))) for token in tokens]
    return joined([*pieces, assembly.take(Output("a", (), "length"))])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=40), prompt=st.text(min_size=1, max_size=40))
def test_pieces_make_the_text_after_the_prompt(name: str, text: str, prompt: str) -> None:
    tokenizer = TOKENIZERS[name]
    before, tokens = tokenizer.encode(prompt).ids, tokenizer.encode(text).ids
    whole = tokenizer.decode([*before, *tokens])
    assert answer(tokenizer, before, tokens).text == whole[len(tokenizer.decode(before)) :]


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


def test_a_prompt_is_neither_truncated_nor_padded(tmp_path: Path) -> None:
    """Tokenizers that were saved after training have both switched on."""
    whole = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    expected = tuple(whole.encode("Return the list of items").ids)
    whole.enable_truncation(3)
    whole.enable_padding(length=64)
    whole.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    request = Prompts(tmp_path).request("Return the list of items", SamplingParams(bad=["list"]))
    assert request.prompt == expected
    assert max(map(len, request.bad_words)) < 5
