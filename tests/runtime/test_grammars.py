"""Guides as grammars: over byte-level and SentencePiece vocabularies, and with schemas that nobody meant."""

import json
import random
import string
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.conftest import DEMO_MODEL
from tests.runtime.schemas import random_schemas
from trtforge.core.errors import RequestError
from trtforge.engine_process.requests import GUIDE_KINDS, Guide
from trtforge.runtime.guidance.grammars import Grammars, token_texts

KEYS = (
    *("type", "items", "properties", "required", "anyOf", "enum", "const", "$ref", "$defs", "pattern", "minLength"),
    *("maxItems", "minimum", "multipleOf", "additionalProperties", "patternProperties", "not", "format", "content"),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
    | st.sampled_from(["string", "object", "array", "integer", "#", "#/$defs/a", "^a{1,9}$", "(", "date"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
"""Schemas of any kind, most of them wrong."""


def sentencepiece() -> Tokenizer:
    """As Llama 2's: pieces with ▁ for a space, bytes for what has no piece, special tokens first."""
    special = ["<unk>", "<s>", "</s>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁name", "name", "▁true", "true", "false", "null", '":', '{"', '"}', "▁{", '",', "▁[", "▁two", "words"]
    letters = ["▁", *string.ascii_letters, *string.digits, *'{}[]":,.-_@ü']
    pieces = dict.fromkeys([*special, *byte_pieces, *letters, *words])
    tokenizer = Tokenizer(BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(special)
    return tokenizer


def written(directory: Path) -> Path:
    """The directory of such a tokenizer."""
    sentencepiece().save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    return directory


def walk(grammar: Any, size: int, end: int, draw: random.Random) -> list[int]:
    """Tokens that a grammar allows, drawn until it ends."""
    matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=[end])
    mask, tokens = xgrammar.allocate_token_bitmask(1, size), []
    for _ in range(600):
        matcher.fill_next_token_bitmask(mask)
        logits = torch.zeros(1, size)
        xgrammar.apply_token_bitmask_inplace(logits, mask, vocab_size=size)
        tokens.append(draw.choice((logits[0] == 0).nonzero().flatten().tolist()))
        assert matcher.accept_token(tokens[-1])
        if tokens[-1] == end:
            return tokens[:-1]
    raise AssertionError("the grammar does not end")


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_any_tokens_that_a_grammar_allows_decode_to_what_it_describes(kind: str, tmp_path: Path) -> None:
    directory = DEMO_MODEL if kind == "byte-level" else written(tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    size, end = tokenizer.get_vocab_size() + 5, 1 if kind == "byte-level" else 2  # models pad their vocabularies
    grammars, draw = Grammars(directory, size), random.Random(0)
    before = tokenizer.encode("Answer:").ids
    for schema in random_schemas(30):
        tokens = walk(grammars.compiled(Guide("json_schema", schema)), size, end, draw)
        text = tokenizer.decode([*before, *tokens])[len(tokenizer.decode(before)) :]
        jsonschema.validate(json.loads(text), json.loads(schema))


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_vocabulary_is_the_one_that_xgrammar_makes_of_the_tokenizer(kind: str, tmp_path: Path) -> None:
    directory = DEMO_MODEL if kind == "byte-level" else written(tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    theirs = xgrammar.TokenizerInfo.from_huggingface(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    ours = Grammars(directory, tokenizer.get_vocab_size())._vocabulary()
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    assert special
    assert (ours.vocab_type, ours.vocab_size) == (theirs.vocab_type, theirs.vocab_size)
    for token, (mine, other) in enumerate(zip(ours.decoded_vocab, theirs.decoded_vocab, strict=True)):
        assert mine == (b"" if token in special else other)
    assert token_texts(tokenizer, 4) == ["" if token in special else tokenizer.id_to_token(token) for token in range(4)]


GRAMMARS = Grammars(DEMO_MODEL, 2048)


@settings(max_examples=150)
@given(kind=st.sampled_from(GUIDE_KINDS), value=VALUES, text=st.text(max_size=40), as_json=st.booleans())
def test_whatever_a_guide_says_it_is_compiled_or_refused(kind: Any, value: object, text: str, as_json: bool) -> None:
    guide = Guide(kind, json.dumps(value) if as_json else text)
    refused = None
    try:
        matcher = xgrammar.GrammarMatcher(GRAMMARS.compiled(guide), override_stop_tokens=[1])
        matcher.fill_next_token_bitmask(xgrammar.allocate_token_bitmask(1, 2048))
    except RequestError as error:
        refused = error
    assert refused is None or refused.message.startswith(f"the guide of type {kind}")
    assert refused is None or refused.hint
