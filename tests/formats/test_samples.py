"""Samples are tokenised when they are needed, or when something that decides them is not as it was."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trtforge.formats import samples as module
from trtforge.formats.corpus import TokenWindows, token_windows
from trtforge.formats.samples import Samples


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data that was read, once for each time."""
    seen: list[str] = []

    def counted(source: str, model: Path, **options: int) -> TokenWindows:
        seen.append(source)
        return token_windows(source, model, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "token_windows", counted)
    return seen


def save(path: Path, first: int) -> None:
    save_file({"input_ids": torch.arange(first, first + 24).reshape(3, 8)}, path)


def asked(place: Path, count: int = 3, seed: int = 0) -> Samples:
    return Samples(str(place / "ids.safetensors"), place, count, 8, 100, seed)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save(tmp_path / "ids.safetensors", 0)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_what_was_read_is_known_again(cache: Path, place: Path, read: list[str]) -> None:
    first = asked(place)
    assert first.facts == asked(place).facts
    assert len(read) == 1
    facts = asked(place).facts
    assert (facts.windows, facts.longest, facts.tokens, facts.documents) == (3, 8, 24, 3)
    assert facts.document_lengths == {"8": 3}
    assert facts.digest == first.windows.digest
    assert asked(place).windows == first.windows
    assert len(read) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda place, cache: save(place / "ids.safetensors", 1),
        lambda place, cache: (place / "tokenizer.json").write_text("{ }"),
        lambda place, cache: next((cache / "samples").iterdir()).write_text('{"digest": 1}'),
        lambda place, cache: next((cache / "samples").iterdir()).unlink(),
    ],
)
def test_what_decides_them_is_compared(
    cache: Path, place: Path, read: list[str], change: Callable[[Path, Path], object]
) -> None:
    _ = asked(place).facts
    change(place, cache)
    _ = asked(place).facts
    assert len(read) == 2


def test_other_samples_are_others(cache: Path, place: Path, read: list[str]) -> None:
    for sampled in (asked(place), asked(place, seed=1), asked(place, count=2)):
        _ = sampled.facts
    assert len(read) == 3


def test_too_few_samples_are_warned_of_each_time(
    cache: Path, place: Path, read: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert asked(place, count=4).facts.tokens == 24
    assert len(read) == 2
    assert caplog.text.count("has only 24 of the 32 tokens") == 2


def test_without_a_cache_or_a_known_commit_they_are_read(
    place: Path, read: list[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(module, "content_of", lambda data: None)  # of the hub, which does not answer
    for _ in range(2):
        _ = asked(place).facts
    monkeypatch.undo()
    assert (len(read), cache.exists()) == (2, False)
