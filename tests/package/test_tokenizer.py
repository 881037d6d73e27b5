"""The tokenizer of a repository: end ids from wherever a model says them, and older tokenizers made new."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import BertTokenizer

from tests.conftest import DEMO_MODEL
from tests.package.engines import torch_engine
from trtforge.core.errors import ForgeError
from trtforge.core.extras import install_command
from trtforge.formats.corpus import require_data
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.package.tokenizer import find_tokenizer, read_tokenizer


def tokenizer_directory(directory: Path, **files: dict[str, Any]) -> Path:
    """The demo model's tokenizer with these JSON files beside it."""
    directory.mkdir(exist_ok=True)
    shutil.copy(DEMO_MODEL / "tokenizer.json", directory)
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("files", "end_ids", "pad_id"),
    [
        ({"generation_config": {"eos_token_id": 7}}, (7,), 7),
        ({"generation_config": {"eos_token_id": [7, 8, 7]}, "config": {"eos_token_id": 1}}, (7, 8), 7),
        ({"generation_config": {}, "config": {"eos_token_id": 5, "pad_token_id": 6}}, (5,), 6),
        ({"config": {"text_config": {"eos_token_id": [8, 9], "pad_token_id": 6}}}, (8, 9), 6),
        ({"tokenizer_config": {"eos_token": "<|end_of_text|>", "pad_token": "<|pad|>"}}, (1,), 4),
        ({"tokenizer_config": {"eos_token": {"content": "<|end|>"}}}, (3,), 3),
        ({"special_tokens_map": {"eos_token": "<|end|>"}}, (3,), 3),
        ({"config": {"eos_token_id": None, "pad_token_id": -1}}, (), 0),
        ({}, (), 0),
    ],
)
def test_end_ids_come_from_the_first_place_that_says_them(
    tmp_path: Path, files: dict[str, Any], end_ids: tuple[int, ...], pad_id: int
) -> None:
    tokenizer = read_tokenizer(tokenizer_directory(tmp_path / "tokenizer", **files), 2048)
    assert (tokenizer.end_ids, tokenizer.pad_id) == (end_ids, pad_id)


def test_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ForgeError, match=r"tokenizer missing: .* has no tokenizer.json"):
        find_tokenizer(tmp_path, tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    directory = tokenizer_directory(tmp_path / "tokenizer")
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(ForgeError, match=r"generation_config.json: not JSON"):
        read_tokenizer(directory, 2048)
    (directory / "generation_config.json").unlink()
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ForgeError, match=r"tokenizer.json cannot be loaded"):
        package(PackageConfig(), torch_engine(tmp_path / "engine"), directory, tmp_path / "out")


def test_tokenizer_in_its_older_form_is_converted(tmp_path: Path) -> None:
    directory = tmp_path / "slow"
    directory.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "wor", "##ld"]
    (directory / "vocab.txt").write_text("\n".join(words))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]", "model_max_length": 64})
    )
    repository = package(PackageConfig(), torch_engine(tmp_path / "engine"), directory, tmp_path / "out").path
    converted = Tokenizer.from_file(str(repository / "ensemble" / "1" / "tokenizer" / "tokenizer.json"))
    expected = BertTokenizer.from_pretrained(directory)("hello world")["input_ids"]
    assert converted.encode("hello world").ids == expected


def sentencepiece_directory(directory: Path) -> Path:
    """A tokenizer that is a SentencePiece model alone."""
    import sentencepiece

    model, documents = io.BytesIO(), ("a list of words", "words in a list", "the list is a tuple of the words")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents * 20), model_writer=model, vocab_size=50, model_type="bpe", minloglevel=2
    )
    directory.mkdir()
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    return directory


def test_a_model_of_sentencepiece_is_converted(tmp_path: Path) -> None:
    import sentencepiece

    directory = sentencepiece_directory(tmp_path / "model")
    repository = package(PackageConfig(), torch_engine(tmp_path / "engine"), directory, tmp_path / "out").path
    converted = Tokenizer.from_file(str(repository / "ensemble" / "1" / "tokenizer" / "tokenizer.json"))
    original = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    text = "a tuple of words"
    assert converted.encode(text, add_special_tokens=False).ids == original.encode(text)


def test_without_sentencepiece_its_models_are_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = sentencepiece_directory(tmp_path / "model")
    monkeypatch.setattr("trtforge.formats.tokenizer.find_spec", lambda name: None)
    with pytest.raises(ForgeError) as caught:
        read_tokenizer(directory, 50)
    message = "has tokenizer.model and no tokenizer.json, which is made of it with sentencepiece"
    assert caught.value.message == f"{directory} {message}"
    install = f"`{install_command('sentencepiece')}`"
    assert caught.value.hint == f"Run {install}, or add the tokenizer.json of the same model."
    with pytest.raises(ForgeError, match=message):
        require_data("builtin:stdlib", directory)
    (directory / "tokenizer.model").write_text("IQ== 0\n")  # of tiktoken
    require_data("builtin:stdlib", directory)
    shutil.copy(DEMO_MODEL / "tokenizer.json", directory)
    read_tokenizer(directory, 2048)


def changed(directory: Path, change: Callable[[dict[str, int]], None]) -> Path:
    """The demo model's tokenizer with another vocabulary."""
    tokenizer_directory(directory)
    values = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    change(values["model"]["vocab"])
    (directory / "tokenizer.json").write_text(json.dumps(values))
    return directory


def test_another_tokenizer_than_the_engines_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guides follow the engine's tokenizer, prompts and texts that of the repository."""
    engine = torch_engine(tmp_path / "engine", {"rank0.safetensors": b"x"})
    tokenizer_directory(engine / "tokenizer")

    def swap(vocabulary: dict[str, int]) -> None:
        vocabulary["get"], vocabulary["return"] = vocabulary["return"], vocabulary["get"]

    other, same = changed(tmp_path / "other", swap), tokenizer_directory(tmp_path / "same")
    package(PackageConfig(), engine, same, tmp_path / "out")
    assert caplog.messages == []
    package(PackageConfig(), engine, other, tmp_path / "out")
    (message,) = caplog.messages
    assert message == (
        f"{other / 'tokenizer.json'} and the engine's own tokenizer differ in 2 tokens, such as 'get': prompts and "
        "texts follow the first, the model and its guides the second. Leave out --tokenizer, unless the model was "
        "trained with these"
    )


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    """Its special tokens may lie beyond: Gemma 3 without vision has one for images."""
    engine = torch_engine(tmp_path / "engine", {"rank0.safetensors": b"x"})
    other = changed(tmp_path / "other", lambda vocabulary: vocabulary.update(more=2048))
    with pytest.raises(ForgeError, match=r"has ids up to 2048, and the engine's vocabulary 2048 ids") as caught:
        package(PackageConfig(), engine, other, tmp_path / "out")
    assert caught.value.hint.startswith("Leave out --tokenizer")
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(other / "tokenizer.json"))
    assert package(PackageConfig(), engine, other, tmp_path / "out").path.is_dir()
