"""Safetensors by their headers: what we write the library reads, what the library writes we read, damage is named."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from trtforge.core.digest import DigestThread
from trtforge.core.dtypes import dtype_named
from trtforge.core.errors import ForgeError
from trtforge.formats.shards import RowReader, TensorSpec, Writer, header_of, read_header
from trtforge.formats.tensor_files import load_tensors, map_tensors

shapes = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=5)


@given(shapes=shapes)
def test_library_reads_what_is_written(shapes: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("w") / "a.safetensors"
    tensors = {f"t{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    writer = Writer(path, [TensorSpec(n, dtype_named("float32"), tuple(t.shape)) for n, t in tensors.items()])
    for name, tensor in tensors.items():
        writer.begin(name)
        data = tensor.numpy().tobytes()
        writer.write(data[: len(data) // 2])
        writer.write(data[len(data) // 2 :])
    record = writer.finish()

    assert record.blake3 == blake3(path.read_bytes()).hexdigest()
    assert record.bytes == path.stat().st_size
    read = load_file(path)
    assert list(read) == sorted(tensors) or set(read) == set(tensors)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=12), seed=st.integers(0, 2**16))
def test_a_thread_digests_what_is_written(
    sizes: list[int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Files in turns, from one buffer that is used again once everything is digested."""
    place, digests = tmp_path_factory.mktemp("w"), DigestThread()
    specs = [TensorSpec(f"t{number}", dtype_named("int8"), (size,)) for number, size in enumerate(sizes)]
    writers = [Writer(place / name, specs, digests) for name in ("a", "b")]
    generator, buffer = np.random.default_rng(seed), np.zeros(max(sizes), np.uint8)
    for spec, size in zip(specs, sizes, strict=True):
        digests.wait()
        buffer[:size] = generator.integers(0, 256, size, np.uint8)
        for writer in writers:
            writer.begin(spec.name)
            writer.write(buffer[:size].data)
    records = [writer.finish() for writer in writers]
    digests.close()
    assert [record.blake3 for record in records] == [blake3((place / "a").read_bytes()).hexdigest()] * 2
    assert (place / "a").read_bytes() == (place / "b").read_bytes()


def test_rows_are_those_of_the_file(tmp_path: Path) -> None:
    table = torch.arange(24, dtype=torch.int16).view(6, 4)
    save_file({"t": table, "u": torch.zeros(3)}, tmp_path / "a.safetensors")
    stored = {tensor.spec.name: tensor for tensor in read_header(tmp_path / "a.safetensors")}["t"]
    with RowReader() as reader:
        data = reader.read(stored, 2, 5, memoryview(bytearray(100)))
    assert bytes(data) == table[2:5].numpy().tobytes()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    save_file({"t": torch.zeros(100)}, path)
    return path


@pytest.mark.parametrize("keep", [-1, 4, 20])
def test_truncated_file_is_named(file: Path, keep: int) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(ForgeError, match=r"a\.safetensors (is truncated|is not a safetensors)") as caught:
        read_header(file)
    assert caught.value.hint


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ForgeError, match="is not a safetensors file"):
        read_header(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        [],
    ],
)
def test_damaged_header_is_named(tmp_path: Path, entry: object) -> None:
    text = json.dumps({"t": entry}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(ForgeError, match=r"a\.safetensors"):
        read_header(path)


def test_unknown_dtype_is_named(tmp_path: Path) -> None:
    text = json.dumps({"t": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(ForgeError, match="t: dtype F4 is not known"):
        read_header(path)


def test_writer_refuses_another_order(tmp_path: Path) -> None:
    specs = [TensorSpec(name, dtype_named("int8"), (2,)) for name in ("a", "b")]
    writer = Writer(tmp_path / "a.safetensors", specs)
    with pytest.raises(AssertionError, match="b was written where a was announced"):
        writer.begin("b")
    writer.close()


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 3), (3, 4)])
def test_columns_are_those_of_the_file(tmp_path: Path, start: int, stop: int) -> None:
    table = torch.arange(24, dtype=torch.int16).view(6, 4)
    save_file({"t": table}, tmp_path / "a.safetensors")
    (stored,) = read_header(tmp_path / "a.safetensors")
    with RowReader() as reader:
        data = reader.read_columns(stored, start, stop, memoryview(bytearray(100)))
    assert bytes(data) == table[:, start:stop].contiguous().numpy().tobytes()


def test_who_looks_on_sees_every_byte_that_is_read(tmp_path: Path) -> None:
    table = torch.arange(24, dtype=torch.int16).view(6, 4)
    save_file({"t": table}, tmp_path / "a.safetensors")
    (stored,) = read_header(tmp_path / "a.safetensors")
    seen: list[tuple[str, int, bytes]] = []
    with RowReader(lambda tensor, first, data: seen.append((tensor.spec.name, first, bytes(data)))) as reader:
        reader.read(stored, 2, 4, memoryview(bytearray(100)))
        reader.read_columns(stored, 0, 1, memoryview(bytearray(100)))
    values = table.numpy().tobytes()
    assert seen == [("t", 16, values[16:32]), *(("t", row * 8, values[row * 8 : row * 8 + 2]) for row in range(6))]


def test_a_read_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"t": torch.zeros(3)}, tmp_path / "a.safetensors")
    (stored,) = read_header(tmp_path / "a.safetensors")

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with RowReader() as reader, pytest.raises(ForgeError, match=r"a\.safetensors: Input/output error \(t\)") as caught:
        reader.read(stored, 0, 3, memoryview(bytearray(12)))
    assert "network share" in caught.value.hint


def test_a_write_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path / "a.safetensors", [TensorSpec("t", dtype_named("int8"), (2,))])
    writer.begin("t")

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="No space left on device") as caught:
        writer.write(b"ab")
    assert caught.value.filename == str(tmp_path / "a.safetensors")
    writer.close()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    writer = Writer(tmp_path / "a.safetensors", [TensorSpec("t", dtype_named("int8"), (10,))])
    writer.begin("t")
    writer.write(bytes(range(10)))
    record = writer.finish()
    assert load_file(tmp_path / "a.safetensors")["t"].tolist() == list(range(10))
    assert record.blake3 == blake3((tmp_path / "a.safetensors").read_bytes()).hexdigest()


def with_header(path: Path, entries: object) -> Path:
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": ["2"]}, r"header is damaged: b: '2' in its shape is not a non-negative integer"),
        ({"shape": [2.0]}, r"b: 2\.0 in its shape"),
        ({"shape": [-2]}, "b: -2 in its shape"),
        ({"shape": [True]}, "b: True in its shape"),
        ({"shape": [1 << 70]}, r"b: \d+ in its shape"),
        ({"shape": [1] * 9}, "b: its shape is .* not a list of at most 8 numbers"),
        ({"data_offsets": ["8", 16]}, "b: '8' in its data_offsets"),
        ({"data_offsets": [8.0, 16]}, r"b: 8\.0 in its data_offsets"),
        ({"data_offsets": [8]}, "b: its byte range does not fit its shape"),
        ({"data_offsets": [16, 8]}, "b: its byte range does not fit its shape"),
        ({"data_offsets": None}, "b: its data_offsets is None"),
        ({"dtype": 3}, "b: its dtype is 3"),
        ({"dtype": "F31"}, "b: dtype F31 is not known"),
        ({"data_offsets": [4, 12]}, r"safetensors is damaged: \d+ bytes"),
    ],
)
def test_each_field_of_a_header_is_judged(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    a = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    b = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]} | changes
    path = with_header(tmp_path / "a.safetensors", {"a": a, "b": b})
    with pytest.raises(ForgeError, match=message) as caught:
        read_header(path)
    assert caught.value.hint


def test_tensors_share_no_bytes_and_leave_none(tmp_path: Path) -> None:
    def tensor(start: int, end: int) -> dict[str, object]:
        return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}

    whole = with_header(tmp_path / "a.safetensors", {"b": tensor(8, 16), "a": tensor(0, 8), "empty": tensor(8, 8)})
    assert {stored.spec.name for stored in read_header(whole)} == {"a", "b", "empty"}
    overlapping = with_header(tmp_path / "b.safetensors", {"a": tensor(0, 9), "b": tensor(8, 16)})
    with pytest.raises(ForgeError, match="b overlaps the one before it"):
        read_header(overlapping)
    gap = with_header(tmp_path / "c.safetensors", {"a": tensor(0, 7), "b": tensor(8, 16)})
    with pytest.raises(ForgeError, match="b leaves a gap before it"):
        read_header(gap)


def test_a_repeated_name_and_a_pipe_are_refused(tmp_path: Path) -> None:
    entry = '"a": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}'
    text = f"{{{entry}, {entry}}}".encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ForgeError, match="the key 'a' occurs twice"):
        read_header(path)
    os.mkfifo(tmp_path / "pipe")  # whose opening waits for a writer
    with pytest.raises(ForgeError, match="pipe: not a regular file"):
        read_header(tmp_path / "pipe")


def test_the_library_is_asked_after_the_header(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"t": torch.ones(3)}, path)
    assert torch.equal(load_tensors(path)["t"], torch.ones(3))
    path.write_bytes(path.read_bytes()[:-1])
    for read in (load_tensors, map_tensors):
        with pytest.raises(ForgeError, match=r"a\.safetensors is truncated"):
            read(path)
        with pytest.raises(ForgeError, match="none"):
            read(tmp_path / "none")
    path.write_bytes(path.read_bytes() + bytes(101))
    with pytest.raises(ForgeError, match=r"a\.safetensors is damaged: \d+ bytes, its header"):
        read_header(path)


def test_the_disk_is_given_every_byte_once_while_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr("trtforge.formats.shards._STARTED_BYTES", 1000)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, first, count, advice: told.append((first, count)))
    spec = TensorSpec("t", dtype_named("int8"), (2500,))
    writer = Writer(tmp_path / "a.safetensors", [spec])
    header = len(header_of([spec]))
    writer.begin("t")
    for size in (700, 700, 1000, 100):
        writer.write(bytes(size))
    assert writer.finish().bytes == header + 2500
    first = next(total for total in (header + 700, header + 1400, header + 2400) if total >= 1000)
    assert told[0] == (0, first)
    assert [start for start, _ in told[1:]] == [start + count for start, count in told[:-1]]
    assert all(count >= 1000 for _, count in told)
    assert sum(count for _, count in told) > header + 2500 - 1000


def test_a_file_system_that_takes_no_hints_gets_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("trtforge.formats.shards._STARTED_BYTES", 1)
    monkeypatch.setattr(os, "posix_fadvise", refused)
    writer = Writer(tmp_path / "a.safetensors", [TensorSpec("t", dtype_named("int8"), (3,))])
    writer.begin("t")
    writer.write(b"abc")
    writer.finish()
    assert (tmp_path / "a.safetensors").read_bytes().endswith(b"abc")


def test_a_disk_that_is_full_when_the_file_is_closed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS reports it there. A descriptor is released even by a close that fails."""
    path, closed = tmp_path / "a.safetensors", list[int]()
    writer = Writer(path, [])

    def fail(descriptor: int) -> None:
        closed.append(descriptor)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", fail)
        with pytest.raises(OSError, match="quota exceeded") as caught:
            writer.finish()
        writer.close()
    assert caught.value.filename == str(path)
    assert len(closed) == 1
    os.close(closed[0])
