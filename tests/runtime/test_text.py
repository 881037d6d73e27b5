"""`trtforge generate` runs exactly the engine that was compiled."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import EngineConfig
from trtforge.engine_process.requests import SamplingParams
from trtforge.runtime.text import generate_text


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    checkpoint = convert(ConvertConfig(dtype="float32"), DEMO_MODEL, tmp_path / "checkpoint").path
    return compile_engine(EngineConfig(backend="torch"), checkpoint, tmp_path / "engine").path


def answer(engine: Path) -> str:
    return generate_text(engine, "Return the number of", max_tokens=8, sampling=SamplingParams()).text


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda engine: flip(engine / "rank0.safetensors"), r"rank0\.safetensors was changed after it was written"),
        (lambda engine: flip(engine / "tokenizer/tokenizer.json"), r"tokenizer\.json was changed after"),
        (lambda engine: (engine / "rank0.safetensors").unlink(), r"rank0\.safetensors is missing"),
        (lambda engine: (engine / "rank1.safetensors").touch(), r"rank1\.safetensors is not listed"),
        (lambda engine: (engine / "forge.json").unlink(), r"is not a trtforge engine: it has no forge\.json"),
    ],
)
def test_another_engine_is_refused(engine: Path, change: Callable[[Path], object], message: str) -> None:
    change(engine)
    with pytest.raises(ForgeError, match=message):
        answer(engine)


def test_the_engine_answers_before_and_after_it_is_remembered(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trtforge.core.verified._SETTLED_NS", -1)
    first = answer(engine)
    (record,) = (tmp_path / "cache" / "verified").iterdir()
    assert set(json.loads(record.read_text())["files"]) >= {"rank0.safetensors", "config.json"}
    assert answer(engine) == first
    flip(engine / "rank0.safetensors")
    with pytest.raises(ForgeError, match=r"rank0\.safetensors was changed"):
        answer(engine)


def test_texts_of_several_tokens_and_parts_of_them_end_the_answer(engine: Path) -> None:
    whole = answer(engine)
    for start, end in ((1, 3), (4, 5), (2, 9)):
        word = whole[start:end]
        found = generate_text(engine, "Return the number of", max_tokens=8, sampling=SamplingParams(), stop=("§", word))
        assert (found.text, found.finish_reason) == (whole[: whole.index(word)], "stop_word")
    kept = generate_text(engine, "Return the number of", max_tokens=8, sampling=SamplingParams(), stop=("§",))
    assert (kept.text, kept.finish_reason) == (whole, "length")
