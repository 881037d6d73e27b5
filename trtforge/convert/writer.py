"""Executes a checkpoint plan: sources are read in row slabs, every rank file is written front to back.

Memory is bounded by the slab, neither by the model nor by its largest tensor.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtforge.convert.encode import Encode, computed, slab_encoder
from trtforge.core.dtypes import dtype_named
from trtforge.core.manifest import FileRecord
from trtforge.core.progress import Bar, Progress
from trtforge.formats.calibration import Calibration
from trtforge.formats.shards import RowReader, StoredTensor, Writer
from trtforge.formats.trtllm import rank_file
from trtforge.models.plan import Cast, CheckpointPlan, Layout, Piece, Target
from trtforge.models.transforms import TORCH

_SLAB_BYTES = 16 << 20


@dataclass(frozen=True)
class _Job:
    """What does not change while a checkpoint is written."""

    sources: Mapping[str, StoredTensor]
    layout: Layout
    calibration: Calibration | None
    reader: RowReader
    buffer: bytearray


def write_checkpoint(
    plan: CheckpointPlan,
    layout: Layout,
    sources: Mapping[str, StoredTensor],
    calibration: Calibration | None,
    out: Path,
    progress: Progress,
) -> dict[str, FileRecord]:
    """Write all rank files into `out`; their records, digests included."""
    tp = layout.parallel.tp
    largest_row = max(sources[name].spec.row_bytes for name in plan.sources)
    total = sum(target.spec.nbytes for target in plan.targets) * tp
    records: dict[str, FileRecord] = {}
    with RowReader() as reader, progress.bar("Converting", total, "B") as bar:
        job = _Job(sources, layout, calibration, reader, bytearray(max(_SLAB_BYTES, 2 * largest_row)))
        for stage in range(layout.parallel.pp):
            targets = [target for target in plan.targets if target.pp_rank == stage]
            specs = [target.spec for target in targets]
            paths = [out / rank_file(stage * tp + rank) for rank in range(tp)]
            with ExitStack() as opened:
                writers = [Writer(path, specs) for path in paths]
                for writer in writers:
                    opened.callback(writer.abandon)
                for target in targets:
                    _write_target(target, writers, job, bar)
                records |= {writer.path.name: writer.finish() for writer in writers}
    return records


def _write_target(target: Target, writers: list[Writer], job: _Job, bar: Bar) -> None:
    for writer in writers:
        writer.begin(target.spec.name)
    model_dtype = dtype_named(job.layout.dtype)
    pieces: tuple[Piece, ...] = getattr(target.content, "pieces", ())
    if not pieces:
        for rank, writer in enumerate(writers):
            _emit(computed(target.content, job.calibration, rank, model_dtype), writer, bar)
        return
    encode = slab_encoder(target, job.calibration, model_dtype)
    for piece in pieces:
        _write_piece(piece, encode, writers, job, bar)
    if isinstance(target.content, Cast):
        for rows, writer in zip(target.content.padding, writers, strict=True):
            if rows:
                _emit(torch.zeros(rows * target.spec.row_bytes, dtype=torch.uint8), writer, bar)


def _write_piece(piece: Piece, encode: Encode, writers: list[Writer], job: _Job, bar: Bar) -> None:
    stored = job.sources[piece.source]
    for slab_rows, slab in _slabs(stored, job):
        for cut, writer in zip(piece.cuts, writers, strict=True):
            start, stop = max(cut.rows.start, slab_rows.start), min(cut.rows.stop, slab_rows.stop)
            if start < stop:
                part = slab[start - slab_rows.start : stop - slab_rows.start, cut.cols.start : cut.cols.stop]
                _emit(encode(part, cut), writer, bar)


def _slabs(stored: StoredTensor, job: _Job) -> Iterator[tuple[range, Tensor]]:
    """The tensor as (rows, columns) slabs; an even number of rows each, so that INT4 row pairs stay together."""
    rows = stored.spec.shape[0]
    step = max(2, len(job.buffer) // stored.spec.row_bytes // 2 * 2)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        data = job.reader.read(stored, start, stop, memoryview(job.buffer))
        yield range(start, stop), torch.frombuffer(data, dtype=TORCH[stored.spec.dtype.name]).view(stop - start, -1)


def _emit(tensor: Tensor, writer: Writer, bar: Bar) -> None:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    writer.write(data.data)
    bar.advance(data.nbytes)
