"""Data for calibration: every kind is read, every defect is named with file and line."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.conftest import DEMO_MODEL
from trtforge.core.errors import ForgeError
from trtforge.formats.corpus import BUILTIN, TokenWindows, require_data, token_windows

TEXTS = [f"Return the number of items in list {i} and nothing else." for i in range(40)]


def windows(source: Path | str, model: Path = DEMO_MODEL, **changes: int) -> TokenWindows:
    settings = {"samples": 4, "length": 16, "vocab_size": 2048, "seed": 0} | changes
    return token_windows(str(source), model, **settings)


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", r"none\.jsonl: no such file"),
        ("none.safetensors", r"none\.safetensors: no such file"),
        ("a.csv", r"a\.csv: no such file"),
        (str(DEMO_MODEL), "demo-model: a directory, not a file with text"),
        ("hf:one/two/three", "hf:one/two/three: not a hub dataset"),
        ("hf:-spam-", "hf:-spam-: not a hub dataset"),
        ("hf:a:b:c:d", "hf:a:b:c:d: not a hub dataset"),
    ],
)
def test_data_that_cannot_be_read_is_known_without_reading(name: str, message: str) -> None:
    require_data(BUILTIN)
    require_data(str(DEMO_MODEL / "heldout.txt"))
    with pytest.raises(ForgeError, match=message):
        require_data(name)


def test_fewer_samples_than_asked_for_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    count = len(windows(source, samples=10_000).windows)
    assert 4 < count < 10_000
    said = f"{source} has only {16 * count:,} of the 160,000 tokens asked for (10000 samples of 16)"
    assert caplog.messages == [said]
    caplog.clear()
    windows(source, samples=count)
    assert caplog.messages == []


def test_windows_are_full_and_reproducible(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    first = windows(source)
    assert [len(window) for window in first.windows] == [16] * 4
    assert first.tokens == 64
    assert windows(source).digest == first.digest
    assert windows(source, seed=1).digest != first.digest


@given(lengths=st.lists(st.integers(0, 5000), max_size=40))
def test_histogram_counts_every_document_in_its_power_of_two(lengths: list[int]) -> None:
    histogram = TokenWindows((), tuple(lengths)).length_histogram
    assert sum(histogram.values()) == len(lengths)
    assert list(map(int, histogram)) == sorted(map(int, histogram))
    for bound, count in histogram.items():
        lower = int(bound) // 2
        assert count == sum(lower < length <= int(bound) or (length, bound) == (0, "1") for length in lengths)


def test_lengths_are_those_of_the_documents_that_were_read(tmp_path: Path) -> None:
    """Whole documents, also the one that fills the last window; none beyond it."""
    from transformers import AutoTokenizer

    texts = ["one two three. " * count for count in (1, 20, 3, 40)]
    (tmp_path / "a.txt").write_text("\f".join(texts))
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    lengths = sorted(len(tokenizer(text.strip())["input_ids"]) for text in texts)
    assert sorted(windows(tmp_path / "a.txt", samples=1000).document_lengths) == lengths
    assert len(windows(tmp_path / "a.txt", samples=1, length=2).document_lengths) == 1
    save_file({"input_ids": torch.ones(3, 7, dtype=torch.int64)}, tmp_path / "ids.safetensors")
    assert windows(tmp_path / "ids.safetensors").length_histogram == {"8": 3}


def test_text_and_jsonl_hold_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\f".join(TEXTS[:3]))
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS[:3]])
    assert windows(tmp_path / "a.txt").digest == windows(source).digest


def test_parquet_is_read(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    assert windows(tmp_path / "a.parquet").digest == windows(source).digest


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "What does the function return?"}]
    source = write_lines(tmp_path / "a.jsonl", [{"messages": messages}])
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(windows(source, length=200).windows[0]) == expected


def test_stored_ids_need_no_tokenizer(tmp_path: Path) -> None:
    ids = torch.arange(60, dtype=torch.int64).view(3, 20)
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    found = windows(tmp_path / "ids.safetensors", tmp_path, samples=2, length=8)
    assert found.windows == (tuple(range(8)), tuple(range(20, 28)))


def test_builtin_text_needs_no_file() -> None:
    found = windows("builtin:stdlib", samples=2, length=64)
    assert [len(window) for window in found.windows] == [64, 64]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"txt": "y"}\n', r'a\.jsonl:2: neither a "text" string nor a "messages" list'),
        ("a.jsonl", '{"text": 3}\n', r"a\.jsonl:1: neither .* \(its text: 3\)"),
        ("a.jsonl", '{"text": null}\n', r"a\.jsonl:1: neither .* \(its text: None\)"),
        ("a.jsonl", '{"prompt": "x", "n": 1}\n', r"a\.jsonl:1: neither .* \(its keys: prompt, n\)"),
        ("a.jsonl", '{"messages": []}\n', r"a\.jsonl:1: neither"),
        ("a.jsonl", '{"messages": [{"content": "x"}]}\n', r"a\.jsonl:1: neither .* with a role"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl:1: nested more than 64 deep"),
        ("a.jsonl", '{"text": ' + "1" * 5000 + "}", r"a\.jsonl:1, line 1: an integer of 5,000 digits"),
        ("a.jsonl", '{"text": "x"}\nnope\n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", "", "fewer than two tokens"),
        ("a.txt", " \n", "fewer than two tokens"),
        ("a.csv", "x", "not a supported kind of data"),
        ("a.parquet", "x", "not parquet"),
    ],
)
def test_defect_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ForgeError, match=message) as caught:
        windows(tmp_path / name)
    assert caught.value.hint


def test_marks_of_windows_and_halves_of_characters_are_read(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text(json.dumps({"text": "broken \ufffd emoji " + TEXTS[0]}))
    (tmp_path / "wild.jsonl").write_text("\ufeff" + json.dumps({"text": "broken \ud83d emoji " + TEXTS[0]}))
    assert windows(tmp_path / "wild.jsonl").windows == windows(tmp_path / "plain.jsonl").windows
    assert windows(tmp_path / "wild.jsonl", length=2).tokens == 8


@pytest.mark.parametrize("content", ["{}", "nope", ""])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes((DEMO_MODEL / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text(content)
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    with pytest.raises(ForgeError, match=r"tokenizer.json cannot be loaded: "):
        windows(source, tmp_path)


def test_a_tokenizer_is_not_blamed_for_memory_that_ran_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(MemoryError):
        windows(write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]))


def test_data_that_cannot_be_read_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    for source, hint in (
        (str(tmp_path / "a.jsonl.gz"), "Unpack it. "),
        ("org/set", "A dataset of the hub is hf:org/set"),
    ):
        with pytest.raises(ForgeError) as caught:
            require_data(source)
        assert caught.value.hint.startswith(hint)
    with pytest.raises(ForgeError, match="no such file") as caught:
        require_data("org/set.jsonl")
    assert caught.value.hint.startswith("Give FILE.jsonl")


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"none\.jsonl: no such file"):
        windows(tmp_path / "none.jsonl")


def test_text_must_be_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ForgeError, match=r"a\.txt: not UTF-8 text \(byte 3\)"):
        windows(tmp_path / "a.txt")


@pytest.mark.parametrize("wrong", [2048, -1])
def test_ids_outside_the_vocabulary_are_named(tmp_path: Path, wrong: int) -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    ids[1, 2] = wrong
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    with pytest.raises(ForgeError, match=f"token id {wrong} is outside the model's vocabulary of 2048"):
        windows(tmp_path / "ids.safetensors")


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(ForgeError, match="has no tokenizer") as caught:
        windows(source, tmp_path)
    assert "FILE.safetensors" in caught.value.hint


def test_built_in_text_for_verification_is_not_that_of_calibration() -> None:
    def found(part: str) -> TokenWindows:
        return token_windows("builtin:stdlib", DEMO_MODEL, samples=8, length=64, vocab_size=2048, seed=0, part=part)

    train, held_out = found("train"), found("held_out")
    assert not set(train.windows) & set(held_out.windows)


def test_line_separators_inside_a_text_are_text(tmp_path: Path) -> None:
    row = json.dumps({"text": "one\u2028two three four"}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(row + "\n", encoding="utf-8")
    assert windows(tmp_path / "a.jsonl").tokens > 4


def test_windows_of_one_token_are_refused(tmp_path: Path) -> None:
    save_file({"input_ids": torch.zeros(4, 1, dtype=torch.int64)}, tmp_path / "ids.safetensors")
    with pytest.raises(ForgeError, match="fewer than two tokens"):
        windows(tmp_path / "ids.safetensors")
