"""The tokenizer file of engines' guided decoding is what xgrammar itself makes of the tokenizer."""

import json
from pathlib import Path

import pytest
import xgrammar
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.conftest import DEMO_MODEL
from tests.runtime.test_grammars import written
from trtforge.package.tokenizer import read_tokenizer


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_executor_reads_the_vocabulary_of_xgrammar(kind: str, tmp_path: Path) -> None:
    """The executor detects how tokens are spelled from the tokenizer's JSON (guidedDecoder.cpp), as xgrammar does."""
    directory = DEMO_MODEL if kind == "byte-level" else written(tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assets = read_tokenizer(directory, tokenizer.get_vocab_size())
    assets.write_guidance(tmp_path / "info.json")
    info = json.loads((tmp_path / "info.json").read_text())
    found = xgrammar.TokenizerInfo._detect_metadata_from_hf(info["tokenizer_str"])
    ours = xgrammar.TokenizerInfo(
        info["encoded_vocab"],
        found["vocab_type"],
        stop_token_ids=info["stop_token_ids"],
        add_prefix_space=found["add_prefix_space"],
    )
    theirs = xgrammar.TokenizerInfo.from_huggingface(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer), stop_token_ids=list(assets.end_ids)
    )
    assert ours.decoded_vocab == theirs.decoded_vocab
    assert json.loads(ours.dump_metadata()) == json.loads(theirs.dump_metadata())
