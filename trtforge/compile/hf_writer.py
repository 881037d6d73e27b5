"""Write a TensorRT-LLM checkpoint as shards of a Hugging Face checkpoint, gathering blocks in row slabs.

Memory is bounded by the slab size. Digests are computed while writing; finished shards of an interrupted run are
reused.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.core.manifest import FileRecord
from trtforge.core.partial import Finished, Group
from trtforge.core.progress import Bar, Progress
from trtforge.formats.hf import INDEX, SINGLE
from trtforge.formats.shards import RowReader, Writer, header_of
from trtforge.models.hf_tensors import Block, Blocks, HfTensor, Scalar, Stack

SHARD_BYTES = 5_000_000_000
"""The default shard size of `save_pretrained` in transformers."""
_SLAB_BYTES = 32 << 20

Slab = NDArray[Any]
"""Rows of a tensor in the file's layout, elements as integers of the same size."""


@dataclass(frozen=True)
class Shard:
    """One file and its tensors."""

    file: str
    tensors: tuple[HfTensor, ...]

    @property
    def bytes(self) -> int:
        """Size of the file."""
        specs = [tensor.spec for tensor in self.tensors]
        return len(header_of(specs)) + sum(spec.nbytes for spec in specs)


def shards_of(tensors: Sequence[HfTensor], limit: int = SHARD_BYTES) -> tuple[Shard, ...]:
    """The tensors in files of at most `limit` bytes; a larger tensor gets its own file. A single file has no number."""
    groups: list[list[HfTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.spec.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.spec.nbytes
    if len(groups) == 1:
        return (Shard(SINGLE, tuple(groups[0])),)
    count = len(groups)
    return tuple(Shard(f"model-{n:05d}-of-{count:05d}.safetensors", tuple(g)) for n, g in enumerate(groups, 1))


def write_tensors(shards: Sequence[Shard], made_from: str, out: Path, progress: Progress) -> dict[str, FileRecord]:
    """Write all shards, and the index if there are several; returns the shards' records.

    `made_from` is the digest of the source checkpoint.
    """
    finished = Finished.read(out)
    records: dict[str, FileRecord] = {}
    with RowReader() as reader, progress.bar("Writing", sum(shard.bytes for shard in shards), "B") as bar:
        for shard in shards:
            group = finished.group([shard.file])
            if group is not None and group.made_from == made_from:
                bar.advance(shard.bytes)
            else:
                group = Group(made_from=made_from, files={shard.file: _write_shard(shard, out, reader, bar)})
                finished.add(group)
            records |= group.files
    if len(shards) > 1:
        (out / INDEX).write_text(_index(shards))
    return records


def _write_shard(shard: Shard, out: Path, reader: RowReader, bar: Bar) -> FileRecord:
    writer = Writer(out / shard.file, [tensor.spec for tensor in shard.tensors])
    try:
        for tensor in shard.tensors:
            writer.begin(tensor.spec.name)
            for part in _parts(tensor, reader):
                flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                writer.write(flat.data)
                bar.advance(flat.nbytes)
        bar.advance(len(header_of(tensor.spec for tensor in shard.tensors)))
        return writer.finish()
    finally:
        writer.close()


def _index(shards: Sequence[Shard]) -> str:
    total = sum(tensor.spec.nbytes for shard in shards for tensor in shard.tensors)
    files = {tensor.spec.name: shard.file for shard in shards for tensor in shard.tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}, indent=2) + "\n"


def _parts(tensor: HfTensor, reader: RowReader) -> Iterator[Slab]:
    """The tensor's content in slabs."""
    content = tensor.content
    if isinstance(content, Stack):
        for expert in content.experts:
            yield from _parts(expert, reader)
        return
    if isinstance(content, Scalar):
        size = content.stored.spec.dtype.size
        data = memoryview(bytearray(size))
        yield np.frombuffer(reader.read_bytes(content.stored, content.index * size, data), np.uint8)
        return
    rows, columns = _shape(tensor)
    step = max(1, _SLAB_BYTES // (columns * content.blocks[0].stored.spec.dtype.size))
    for first in range(0, rows, step):
        wanted = range(first, min(rows, first + step))
        slab = _gather(content, wanted, columns, reader)
        yield slab if _is_a_copy(tensor) else _computed(tensor, slab, reader)


def _shape(tensor: HfTensor) -> tuple[int, int]:
    """Rows and columns of the tensor; a vector is one column, further dimensions are part of the columns."""
    rows, *others = tensor.spec.shape
    return rows, math.prod(others)


def _gather(content: Blocks, wanted: range, columns: int, reader: RowReader) -> Slab:
    """The wanted rows of the tensor."""
    slab = np.empty((len(wanted), columns), f"i{content.blocks[0].stored.spec.dtype.size}")
    for block in content.blocks:
        along, across = (block.cols, block.rows) if content.transposed else (block.rows, block.cols)
        start, stop = max(wanted.start, along.start), min(wanted.stop, along.stop)
        if start < stop:
            inside = range(start - along.start, stop - along.start)
            part = _read(block, inside, content.transposed, reader)
            slab[start - wanted.start : stop - wanted.start, across.start : across.stop] = part
    return slab


def _read(block: Block, inside: range, transposed: bool, reader: RowReader) -> Slab:
    """Rows of a block, or its columns as rows if `transposed`."""
    source = block.source
    (rows, columns), element = source.spec.shape, np.dtype(f"i{source.spec.dtype.size}")
    count = rows * len(inside) if transposed else len(inside) * columns
    data = memoryview(bytearray(count * element.itemsize))
    if transposed:
        data = reader.read_columns(source, inside.start, inside.stop, data)
        return np.frombuffer(data, element).reshape(rows, -1).T
    return np.frombuffer(reader.read(source, inside.start, inside.stop, data), element).reshape(-1, columns)


def _is_a_copy(tensor: HfTensor) -> bool:
    content = tensor.content
    assert isinstance(content, Blocks)
    stored = content.blocks[0].stored.spec.dtype
    same = stored.size == 1 or stored == tensor.spec.dtype  # int8 codes have the same bytes as uint8
    return same and not content.minus_one and content.times is None


def _computed(tensor: HfTensor, slab: Slab, reader: RowReader) -> Slab:
    """Convert a small tensor whose values change: a float32 router, a normalisation weight."""
    import torch

    from trtforge.models.transforms import TORCH

    def numbers(part: Slab, blocks: Blocks) -> torch.Tensor:
        return torch.from_numpy(part).view(TORCH[blocks.blocks[0].stored.spec.dtype.name]).float()

    content = tensor.content
    assert isinstance(content, Blocks)
    values = numbers(slab, content)
    if content.times is not None:
        values = values * numbers(_gather(content.times, range(len(slab)), 1, reader), content.times)
    if content.minus_one:
        values = values - 1
    result: Slab = values.to(TORCH[tensor.spec.dtype.name]).view(torch.uint8).numpy()
    return result
