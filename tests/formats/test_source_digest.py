"""A file's digest is the same however its tensors were read, and another for any other byte."""

import os
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from trtforge.core.errors import ForgeError
from trtforge.formats.shards import RowReader, StoredTensor, raw_header, read_header
from trtforge.formats.source_digest import SourceDigests

ROWS = 12


def tensors_of(path: Path) -> dict[str, StoredTensor]:
    return {tensor.spec.name: tensor for tensor in read_header(path)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digest") / "a.safetensors"
    torch.manual_seed(0)
    save_file({"a": torch.randn(ROWS, 3), "b": torch.randn(ROWS, 5).half(), "empty": torch.zeros(0, 4)}, path)
    return path


def test_it_is_that_of_the_header_and_of_each_tensor(file: Path) -> None:
    expected = blake3(raw_header(file))
    data = file.read_bytes()
    for tensor in read_header(file):
        expected.update(blake3(data[tensor.offset : tensor.offset + tensor.spec.nbytes]).digest())
    assert SourceDigests(tensors_of(file)).of_file(file) == expected.hexdigest()


ranges = st.tuples(st.sampled_from("ab"), st.integers(0, ROWS), st.integers(0, ROWS))


@given(reads=st.lists(ranges.filter(lambda read: read[1] <= read[2]), max_size=12))
def test_the_order_of_reads_changes_nothing(file: Path, reads: list[tuple[str, int, int]]) -> None:
    tensors = tensors_of(file)
    digests = SourceDigests(tensors)
    with RowReader(digests.saw) as reader:
        for name, start, stop in reads:
            reader.read(tensors[name], start, stop, memoryview(bytearray(200)))
    assert digests.of_file(file) == SourceDigests(tensors).of_file(file)


def test_bytes_that_were_seen_are_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(file)
    digests = SourceDigests(tensors)
    buffer = memoryview(bytearray(200))
    with RowReader(digests.saw) as reader:
        reader.read(tensors["a"], 0, 5, buffer)
        reader.read(tensors["a"], 5, ROWS, buffer)
        reader.read(tensors["b"], 0, 4, buffer)
        reader.read(tensors["b"], 6, 8, buffer)  # rows 4 and 5 are missing before it
    offsets: list[int] = []
    preadv = os.preadv

    def record(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", record)
    digests.of_file(file)
    assert offsets == [tensors["b"].offset + 4 * tensors["b"].spec.row_bytes]


@pytest.mark.parametrize("change", ["header", "a", "b"])
def test_any_other_byte_gives_another(file: Path, tmp_path: Path, change: str) -> None:
    tensors = tensors_of(file)
    data = bytearray(file.read_bytes())
    data[len(raw_header(file)) - 1 if change == "header" else tensors[change].offset] ^= 0x01
    copy = tmp_path / "a.safetensors"
    copy.write_bytes(data)
    before = SourceDigests(tensors).of_file(file)
    moved = {name: StoredTensor(t.spec, copy, t.offset) for name, t in tensors.items()}
    assert SourceDigests(moved).of_file(copy) != before


def test_a_file_that_became_shorter_is_named(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "a.safetensors"
    copy.write_bytes(file.read_bytes())
    digests = SourceDigests(tensors_of(copy))
    os.truncate(copy, copy.stat().st_size - 1)
    with pytest.raises(ForgeError, match=r"a\.safetensors became shorter while it was read"):
        digests.of_file(copy)
