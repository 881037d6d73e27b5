"""Conversion reads each byte once, digests it on the way, and holds a few slabs of it."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import MakeHf
from tests.golden.make_hf import write_case
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.dtypes import dtype_named
from trtforge.formats.hf import open_checkpoint
from trtforge.formats.shards import RowReader, StoredTensor, TensorSpec, header_of

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(json.loads((GOLDEN / "cases.json").read_text()))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes read of each tensor from now on."""
    counted: Counter[str] = Counter()
    read_bytes = RowReader.read_bytes

    def count(reader: RowReader, tensor: StoredTensor, first: int, into: memoryview) -> memoryview:
        counted[tensor.spec.name] += len(into)
        return read_bytes(reader, tensor, first, into)

    monkeypatch.setattr(RowReader, "read_bytes", count)
    return counted


def sizes(source: Path) -> dict[str, int]:
    return {name: tensor.spec.nbytes for name, tensor in open_checkpoint(source).tensors.items()}


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_each_byte_is_read_once(make_hf: MakeHf, tmp_path: Path, read: Counter[str], layout: dict[str, int]) -> None:
    source = make_hf(shard_size="50KB")
    convert(ConvertConfig(**layout), source, tmp_path / "out")
    assert read == sizes(source)


def test_int4_reads_each_weight_once_for_codes_and_scales(make_hf: MakeHf, tmp_path: Path, read: Counter[str]) -> None:
    source = make_hf(hidden_size=128, intermediate_size=256)
    save_file({"input_ids": torch.arange(32).view(2, 16)}, tmp_path / "ids.safetensors")
    data = {"data": str(tmp_path / "ids.safetensors"), "samples": 2, "sequence_length": 16}
    config = CalibrateConfig.parse({"format": "int4_awq", "group_size": 64, "data": data}, "test")
    calibration = calibrate(config, source, tmp_path / "calibration").path
    read.clear()
    convert(ConvertConfig(quant="int4_awq", tp=2), source, tmp_path / "out", calibration=calibration)
    assert read == sizes(source)


def test_a_tied_embedding_is_read_for_both_its_uses(make_hf: MakeHf, tmp_path: Path, read: Counter[str]) -> None:
    source = make_hf(tie_word_embeddings=True)
    convert(ConvertConfig(), source, tmp_path / "out")
    twice = {"model.embed_tokens.weight": 2}
    assert read == {name: size * twice.get(name, 1) for name, size in sizes(source).items()}


@pytest.mark.parametrize("case", CASES)
def test_digests_on_the_way_are_those_of_the_files_alone(case: str, tmp_path: Path) -> None:
    source = write_case(case, tmp_path / "hf")
    inputs = convert(ConvertConfig(tp=2), source, tmp_path / "out").manifest.identity.inputs
    assert inputs.items() >= open_checkpoint(source).digests.items()
    assert open_checkpoint(source).digests.keys() == {"config.json", "model.safetensors"}


def test_no_read_is_longer_than_a_slab(make_hf: MakeHf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtforge.convert.slabs.SLAB_BYTES", 4096)
    lengths: list[int] = []
    read = RowReader.read

    def record(reader: RowReader, tensor: StoredTensor, start: int, stop: int, into: memoryview) -> memoryview:
        lengths.append(len(into))
        return read(reader, tensor, start, stop, into)

    monkeypatch.setattr(RowReader, "read", record)
    source = make_hf(vocab_size=5000)
    assert max(sizes(source).values()) == 5000 * 64 * 4
    convert(ConvertConfig(), source, tmp_path / "out")
    assert max(lengths) == 4096


LARGE = 160 << 20
GROWTH = """
import sys
from pathlib import Path
from trtforge.convert.stage import ConvertConfig, convert

def peak():  # of this program alone: getrusage also counts the process that it was forked from
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

convert(ConvertConfig(tp=2, dtype=sys.argv[3]), Path(sys.argv[1]), Path(sys.argv[1] + "-out"))
before = peak()
convert(ConvertConfig(tp=2, dtype=sys.argv[3]), Path(sys.argv[2]), Path(sys.argv[2] + "-out"))
print(before, peak() - before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_does_not_grow_with_the_model(make_hf: MakeHf, tmp_path: Path, dtype: str) -> None:
    """Copied and cast. Mapped pages would count. The large source is all holes: zeros that take no space."""
    small, large = make_hf("small"), make_hf("large")
    rows = LARGE // (64 * 4)
    config = json.loads((large / "config.json").read_text()) | {"vocab_size": rows}
    (large / "config.json").write_text(json.dumps(config))
    specs = [
        TensorSpec(spec.name, dtype_named("float32"), (rows, 64) if spec.shape[0] == 97 else spec.shape)
        for spec in (tensor.spec for tensor in open_checkpoint(small).tensors.values())
    ]
    with (large / "model.safetensors").open("wb") as file:
        file.write(header_of(specs))
        file.truncate(file.tell() + sum(spec.nbytes for spec in specs))

    run = [sys.executable, "-c", GROWTH, str(small), str(large), dtype]
    done = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True)

    before, growth = map(int, done.stdout.split())
    assert before + growth < 600_000_000
    assert growth < LARGE / 4
