"""Compares the tensors of rank files bit for bit with the Hugging Face tensors from which they were made.

Covers all tensors that are copied, cast, cut, regrouped or stacked. The logits cover quantised weights.
"""

from pathlib import Path

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.progress import Progress
from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.shards import RowReader, StoredTensor, read_header
from trtforge.formats.trtllm import rank_file
from trtforge.models.checkpoint_plan import CheckpointPlan, Layout
from trtforge.models.tensor_origins import Origin, origins
from trtforge.models.transforms import TORCH

_SLAB_BYTES = 16 << 20


def check_tensors(
    candidate: Path, reference: HfCheckpoint, plan: CheckpointPlan, layout: Layout, progress: Progress
) -> int:
    """The number of rank tensors that equal their sources. Raises ForgeError naming the first that differs."""
    stored = _stored(candidate, layout.parallel)
    found = list(origins(plan, layout))
    checked: set[tuple[int, str]] = set()
    with RowReader() as reader, progress.bar("Comparing tensors", len(found), "parts") as bar:
        for origin in found:
            target = stored[origin.rank].get(origin.target.name)
            if target is None or target.spec != origin.target:
                raise _differs(candidate, origin, "is missing, or has another dtype or shape")
            if not _equal(origin, target, reference.tensors[origin.piece.source], reader):
                raise _differs(candidate, origin, f"differs from its source {origin.piece.source}")
            checked.add((origin.rank, origin.target.name))
            bar.advance(1)
    return len(checked)


def _stored(candidate: Path, parallel: Parallel) -> list[dict[str, StoredTensor]]:
    files = [candidate / rank_file(rank.index) for rank in parallel.ranks]
    return [{tensor.spec.name: tensor for tensor in read_header(file)} for file in files]


def _differs(candidate: Path, origin: Origin, what: str) -> ForgeError:
    return ForgeError(
        f"{candidate / rank_file(origin.rank)}: {origin.target.name} {what}",
        hint="Convert again. If the error stays, another converter wrote the checkpoint with swapped tensors.",
    )


def _equal(origin: Origin, target: StoredTensor, source: StoredTensor, reader: RowReader) -> bool:
    width = len(origin.cols)
    step = max(1, _SLAB_BYTES // (4 * max(width, source.spec.row_bytes // source.spec.dtype.size)))
    for start in range(0, len(origin.rows), step):
        count = min(step, len(origin.rows) - start)
        written = _target_rows(target, origin.first + start, count, width, reader)
        expected = _source_rows(origin, source, origin.rows.start + start, count, reader)
        dtype = TORCH[target.spec.dtype.name]
        expected = (expected.float() + 1).to(dtype) if origin.plus_one else expected.to(dtype)
        if not torch.equal(_bits(written), _bits(expected)):
            return False
    return True


def _target_rows(target: StoredTensor, first: int, count: int, width: int, reader: RowReader) -> Tensor:
    """Rows of the tensor, viewed as a matrix (rows, width)."""
    size = target.spec.dtype.size
    flat = StoredTensor(
        type(target.spec)(target.spec.name, target.spec.dtype, (target.spec.nbytes // (width * size), width)),
        target.file,
        target.offset,
    )
    return _tensor(reader.read(flat, first, first + count, memoryview(bytearray(count * width * size))), flat, count)


def _source_rows(origin: Origin, source: StoredTensor, first: int, count: int, reader: RowReader) -> Tensor:
    if origin.piece.transposed:
        buffer = memoryview(bytearray(source.spec.shape[0] * count * source.spec.dtype.size))
        block = _tensor(reader.read_columns(source, first, first + count, buffer), source, source.spec.shape[0])
        return block.T[:, origin.cols.start : origin.cols.stop]
    buffer = memoryview(bytearray(count * source.spec.row_bytes))
    rows = _tensor(reader.read(source, first, first + count, buffer), source, count)
    return rows[:, origin.cols.start : origin.cols.stop]


def _tensor(data: memoryview, stored: StoredTensor, rows: int) -> Tensor:
    return torch.frombuffer(data, dtype=TORCH[stored.spec.dtype.name]).view(rows, -1)


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as bytes, so that NaN equals NaN and -0 differs from 0."""
    return tensor.contiguous().view(-1).view(torch.uint8)
