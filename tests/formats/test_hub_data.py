"""Datasets of the hub: what is asked of the datasets library, and what becomes of its rows. The library is a fake."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trtforge.core.errors import ForgeError
from trtforge.core.extras import install_command
from trtforge.formats.hub_data import HubData, commit_of, hub_rows, pinned_to, require_hub_data


class FakeRows:
    def __init__(self, rows: list[dict[str, Any]], calls: list[Any]) -> None:
        self._rows, self._calls = rows, calls

    def shuffle(self, **options: int) -> "FakeRows":
        self._calls.append(options)
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], list[Any]]:
    """Rows to serve, and the calls that were made."""
    rows: list[dict[str, Any]] = []
    calls: list[Any] = []

    def load_dataset(*names: str | None, **options: Any) -> FakeRows:
        if names[0] == "no/such":
            raise ValueError("Dataset 'no/such' doesn't exist\nmore")
        calls.append((names, options))
        return FakeRows(rows, calls)

    module = ModuleType("datasets")
    vars(module)["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setenv("HF_TOKEN", "secret")
    return rows, calls


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf:a/b", HubData("a/b", None, "train")),
        ("hf:a/b:c", HubData("a/b", "c", "train")),
        ("hf:abisee/cnn_dailymail:3.0.0:validation", HubData("abisee/cnn_dailymail", "3.0.0", "validation")),
        ("hf:a/b::test", HubData("a/b", None, "test")),
        ("hf:a/b@v1", HubData("a/b", None, "train", "v1")),
        ("hf:a/b@refs/convert/parquet:c:test", HubData("a/b", "c", "test", "refs/convert/parquet")),
    ],
)
def test_parts_of_a_source(source: str, expected: HubData) -> None:
    assert HubData.parse(source) == expected
    assert HubData.parse(str(expected)) == expected


@pytest.mark.parametrize("source", ["hf:", "hf:a:b:c:d", "a/b", "hf:a/b@", "hf:@main"])
def test_other_sources_are_refused(source: str) -> None:
    with pytest.raises(ForgeError, match="not a hub dataset"):
        HubData.parse(source)


def test_rows_are_streamed_in_a_seeded_order(library: tuple[list[dict[str, Any]], list[Any]]) -> None:
    rows, calls = library
    rows += [{"article": "One.", "id": 1}, {"text": "Two."}, {"messages": [{"role": "user", "content": "Three."}]}]
    assert list(hub_rows("hf:a/b@v1:c:train", seed=7)) == [
        ("hf:a/b@v1:c:train: row 0", {"text": "One."}),
        ("hf:a/b@v1:c:train: row 1", {"text": "Two."}),
        ("hf:a/b@v1:c:train: row 2", {"messages": [{"role": "user", "content": "Three."}]}),
    ]
    assert calls == [
        (("a/b", "c"), {"split": "train", "revision": "v1", "streaming": True, "token": "secret"}),
        {"seed": 7, "buffer_size": 10_000},
    ]


def test_a_dataset_without_text(library: tuple[list[dict[str, Any]], list[Any]]) -> None:
    library[0].append({"label": 3, "image": 4})
    with pytest.raises(ForgeError, match="no text field among label, image"):
        list(hub_rows("hf:a/b", seed=0))


def test_an_unknown_dataset(library: tuple[list[dict[str, Any]], list[Any]]) -> None:
    with pytest.raises(ForgeError, match=r"cannot be read: Dataset 'no/such' doesn't exist$") as caught:
        list(hub_rows("hf:no/such", seed=0))
    assert "local file" in caught.value.hint


COMMIT = "0123456789" * 4


def test_the_commit_of_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path / "snapshots" / COMMIT)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert commit_of("hf:a/b@v1:c") == COMMIT
    assert asked == [
        ("a/b", {"repo_type": "dataset", "revision": "v1", "allow_patterns": [".gitattributes"], "token": None})
    ]
    assert commit_of(pinned_to("hf:a/b:c:test", COMMIT)) == COMMIT
    assert len(asked) == 1
    assert pinned_to("hf:a/b:c:test", COMMIT) == f"hf:a/b@{COMMIT}:c:test"


def test_a_commit_that_nobody_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ForgeError, match="hf:a/b: its commit cannot be found") as caught:
        commit_of("hf:a/b")
    assert "hf:OWNER/NAME@COMMIT" in caught.value.hint


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for read in (lambda: list(hub_rows("hf:a/b", seed=0)), lambda: require_hub_data("hf:a/b")):
        with pytest.raises(ForgeError, match="hf:a/b needs the datasets library") as caught:
            read()
        assert caught.value.hint == f"Run `{install_command('hub-data')}`."
