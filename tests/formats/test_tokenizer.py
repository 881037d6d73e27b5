"""Damaged tokenizers and end ids that no model makes are refused by file, everywhere before the work."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import DEMO_MODEL
from tests.package.test_tokenizer import tokenizer_directory
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Manifest, files_below, read_manifest, record_of
from trtforge.core.recipe import EngineConfig, GateConfig
from trtforge.engine_process.requests import SamplingParams
from trtforge.formats.special_tokens import require_end_ids
from trtforge.formats.tokenizer import load_tokenizer, require_tokenizer
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.runtime.text import generate_text
from trtforge.verify.stage import verify

VOCABULARY = 2048
BROKEN = '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}'


def test_a_whole_one_is_loaded() -> None:
    assert load_tokenizer(DEMO_MODEL / "tokenizer.json").get_vocab_size() == VOCABULARY
    require_tokenizer(DEMO_MODEL, VOCABULARY)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "1.0"}', BROKEN])
def test_a_broken_one_is_named_with_the_reason(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(ForgeError, match=r"tokenizer\.json cannot be loaded: \S+") as caught:
        require_tokenizer(tmp_path, VOCABULARY)
    assert "Download it again" in caught.value.hint


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_an_error_or_none(tmp_path: Path, data: st.DataObject) -> None:
    text = bytearray((DEMO_MODEL / "tokenizer.json").read_bytes())
    start = data.draw(st.integers(0, len(text) - 1))
    text[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
    (tmp_path / "tokenizer.json").write_bytes(text)
    with suppress(ForgeError):
        require_tokenizer(tmp_path, VOCABULARY)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"generation_config": {"eos_token_id": [7, 2048]}}, "generation_config.json: eos_token_id 2048"),
        ({"config": {"eos_token_id": 5000}}, "config.json: eos_token_id 5000"),
        ({"config": {"text_config": {"eos_token_id": [1, 5000]}}}, "config.json: eos_token_id 5000"),
        (
            {"generation_config": {"eos_token_id": 1}, "config": {"eos_token_id": 4000}},
            "config.json: eos_token_id 4000",
        ),
        (
            {"tokenizer_config": {"eos_token": "<e>", "added_tokens_decoder": {"2048": {"content": "<e>"}}}},
            "tokenizer_config.json: the id of eos_token, 2048",
        ),
    ],
)
def test_end_ids_beyond_the_vocabulary(tmp_path: Path, files: dict[str, Any], said: str) -> None:
    directory = tokenizer_directory(tmp_path / "tokenizer", **files)
    with pytest.raises(ForgeError) as caught:
        require_tokenizer(directory, VOCABULARY)
    assert caught.value.message == (
        f"{directory}/{said} is beyond the model's vocabulary of 2048 ids: generation would never stop"
    )


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens": {"<|im_start|>": 2048}},
        {"tokenizer_config": {"added_tokens_decoder": {"2048": {"content": "<|im_start|>"}}}},
        {"tokenizer_config": {"additional_special_tokens": ["<|im_start|>"], "add_bos_token": True}},
        {"tokenizer_config": {"pad_token": {"content": "<|im_start|>"}}},
        {"special_tokens_map": {"pad_token": "<|im_start|>", "bos_token": None}},
        {"special_tokens_map": {"pad_token": "of"}},  # a word of the vocabulary
    ],
)
def test_tokens_that_only_transformers_would_add_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: dict[str, Any]
) -> None:
    known = tmp_path / "tokenizer.json"
    shutil.copyfile(DEMO_MODEL / "tokenizer.json", known)
    require_tokenizer(tmp_path, VOCABULARY)
    assert caplog.text == ""
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    require_tokenizer(tmp_path, VOCABULARY)
    (message,) = caplog.messages
    name = "of" if "of" in json.dumps(files) else "<|im_start|>"
    assert message.startswith(f"{known} lacks {name} among its added_tokens, which other files of the tokenizer name")


def test_without_a_tokenizer_end_ids_are_nobodys(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 50256}')
    require_tokenizer(tmp_path, VOCABULARY)
    (tmp_path / "vocab.txt").write_text("[UNK]")
    with pytest.raises(ForgeError, match=r"config\.json: eos_token_id 50256 is beyond"):
        require_tokenizer(tmp_path, VOCABULARY)


def test_a_directory_whose_name_is_not_text_is_to_be_renamed(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"mod\xff")
    directory.mkdir()
    shutil.copy(DEMO_MODEL / "tokenizer.json", directory)
    with pytest.raises(ForgeError, match="its name is not UTF-8") as caught:
        load_tokenizer(directory / "tokenizer.json")
    assert caught.value.hint == "Rename the model's directory."


@pytest.mark.parametrize("wrong", ['"</s>"', "true", "[1, 2.5]"])
def test_an_end_id_that_is_no_number_is_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
    with pytest.raises(ForgeError, match=r"generation_config\.json: eos_token_id .* is not a token id"):
        require_end_ids(tmp_path, 10)


def test_ids_within_the_vocabulary_and_unknown_vocabularies(tmp_path: Path) -> None:
    directory = tokenizer_directory(tmp_path / "tokenizer", generation_config={"eos_token_id": [2047, -1]})
    require_tokenizer(directory, VOCABULARY)
    require_tokenizer(directory, None)


@pytest.mark.parametrize("decoder", [{"x": {"content": "<e>"}}, [1], {"1": 5}])
def test_odd_tokens_are_named(tmp_path: Path, decoder: object) -> None:
    files = {"tokenizer_config": {"eos_token": "<e>", "added_tokens_decoder": decoder}}
    directory = tokenizer_directory(tmp_path / "tokenizer", **files)
    with pytest.raises(ForgeError, match=r"tokenizer_config\.json: added_tokens_decoder is damaged"):
        require_tokenizer(directory, VOCABULARY)


Stage = Callable[[Path, Path], object]
"""Uses the artifact in the first directory; the second is where it may write."""


def run_convert(directory: Path, out: Path) -> object:
    return convert(ConvertConfig(dtype="float32"), directory, out)


def run_verify(directory: Path, out: Path) -> object:
    return verify(directory, DEMO_MODEL, GateConfig(samples=1, sequence_length=16))


def run_verify_against(directory: Path, out: Path) -> object:
    checkpoint = convert(ConvertConfig(dtype="float32"), DEMO_MODEL, out.parent / "whole").path
    return verify(checkpoint, directory, GateConfig(samples=1, sequence_length=16))


def run_compile(directory: Path, out: Path) -> object:
    return compile_engine(EngineConfig(backend="torch"), directory, out)


def run_compile_llmapi(directory: Path, out: Path) -> object:
    return compile_engine(EngineConfig(backend="llmapi"), directory, out)


def run_package(directory: Path, out: Path) -> object:
    return package(PackageConfig(), directory, None, out)


def run_generate(directory: Path, out: Path) -> object:
    return generate_text(directory, "The", max_tokens=1, sampling=SamplingParams())


def rewritten(directory: Path, name: str, text: str) -> None:
    """Change a file of an artifact, and what its manifest says of it: whoever made it so meant it."""
    (directory / name).write_text(text)
    manifest = read_manifest(directory)
    if manifest is not None:
        files = {file: record_of(directory / file) for file in files_below(directory)}
        Manifest(identity=manifest.identity, files=files).write(directory)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("artifacts")
    shutil.copytree(DEMO_MODEL, base / "hf")
    checkpoint = convert(ConvertConfig(dtype="float32"), base / "hf", base / "checkpoint").path
    engine = compile_engine(EngineConfig(backend="torch"), checkpoint, base / "engine").path
    return {"hf": base / "hf", "checkpoint": checkpoint, "engine": engine}


USERS = [
    ("hf", "", run_convert),
    ("hf", "", run_verify_against),
    ("hf", "", run_compile_llmapi),
    ("checkpoint", "tokenizer/", run_verify),
    ("checkpoint", "tokenizer/", run_compile),
    ("engine", "tokenizer/", run_package),
    ("engine", "tokenizer/", run_generate),
]


@pytest.mark.parametrize(("kind", "below", "run"), USERS, ids=[run.__name__ for *_, run in USERS])
@pytest.mark.parametrize("broken", ["tokenizer.json", "generation_config.json"])
def test_whoever_uses_it_refuses_it(
    artifacts: dict[str, Path], tmp_path: Path, kind: str, below: str, run: Stage, broken: str
) -> None:
    directory, out = tmp_path / kind, tmp_path / "out"
    shutil.copytree(artifacts[kind], directory)
    if broken == "tokenizer.json":
        rewritten(directory, below + broken, BROKEN)
        message = rf"{kind}/{below}tokenizer\.json cannot be loaded: "
    else:
        rewritten(directory, below + broken, json.dumps({"eos_token_id": 2048}))
        message = rf"{kind}/{below}generation_config\.json: eos_token_id 2048 is beyond the model's vocabulary of 2048"
    with pytest.raises(ForgeError, match=message):
        run(directory, out)
    assert not list(tmp_path.glob("*out*"))
