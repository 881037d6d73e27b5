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
from trtforge.models.content import Absorbed, Cast, Piece, Target, pieces_of
from trtforge.models.plan import CheckpointPlan, Layout
from trtforge.models.split import Cut
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
    content = target.content
    if isinstance(content, Absorbed):
        _write_absorbed(content, target, writers, job, bar)
        return
    pieces = pieces_of(content)
    if not pieces:
        for rank, writer in enumerate(writers):
            _emit(computed(content, job.calibration, rank, model_dtype), writer, bar)
        return
    encode = slab_encoder(target, job.calibration, model_dtype)
    for piece in pieces:
        _write_piece(piece, encode, writers, job, bar)
    if isinstance(content, Cast):
        row_bytes = target.spec.nbytes // max(1, target.spec.shape[0])
        for rows, writer in zip(content.padding, writers, strict=True):
            if rows:
                _emit(torch.zeros(rows * row_bytes, dtype=torch.uint8), writer, bar)


def _write_piece(piece: Piece, encode: Encode, writers: list[Writer], job: _Job, bar: Bar) -> None:
    for slab_rows, slab in _slabs(piece, job):
        for cut, writer in zip(piece.cuts, writers, strict=True):
            for rows in cut.rows:
                start, stop = max(rows.start, slab_rows.start), min(rows.stop, slab_rows.stop)
                if start < stop:
                    part = slab[start - slab_rows.start : stop - slab_rows.start, cut.cols.start : cut.cols.stop]
                    _emit(encode(part, cut), writer, bar)


def _write_absorbed(content: Absorbed, target: Target, writers: list[Writer], job: _Job, bar: Bar) -> None:
    """Head by head: as the converter's einsum, in the checkpoint's dtype."""
    dtype = TORCH[target.spec.dtype.name]
    for heads, writer in zip(content.heads, writers, strict=True):
        for head in heads:
            query = _rows(content.query, head, content.nope + content.rope, job).to(dtype)
            key = _rows(content.key, head, content.nope + content.value, job)[: content.nope].to(dtype)
            _emit(torch.einsum("dq,dk->kq", query[: content.nope], key), writer, bar)
            _emit(query[content.nope :], writer, bar)


def _rows(piece: Piece, index: int, count: int, job: _Job) -> Tensor:
    """The `index`-th group of `count` rows."""
    stored = job.sources[piece.source]
    data = bytearray(count * stored.spec.row_bytes)
    job.reader.read(stored, index * count, (index + 1) * count, memoryview(data))
    return torch.frombuffer(data, dtype=TORCH[stored.spec.dtype.name]).view(count, -1)


def _slabs(piece: Piece, job: _Job) -> Iterator[tuple[range, Tensor]]:
    """The rows that any rank gets, as (rows, columns) slabs; an even number each: INT4 row pairs stay together."""
    stored = job.sources[piece.source]
    dtype = TORCH[stored.spec.dtype.name]
    if piece.transposed:
        (lines, _), size = stored.spec.shape, stored.spec.dtype.size
        step = max(2, len(job.buffer) // (lines * size) // 2 * 2)
    else:
        step = max(2, len(job.buffer) // stored.spec.row_bytes // 2 * 2)
    for wanted in _union(piece.cuts):
        for start in range(wanted.start, wanted.stop, step):
            stop = min(wanted.stop, start + step)
            if piece.transposed:
                block = job.reader.read_columns(stored, start, stop, memoryview(job.buffer))
                yield range(start, stop), torch.frombuffer(block, dtype=dtype).view(-1, stop - start).T
            else:
                data = job.reader.read(stored, start, stop, memoryview(job.buffer))
                yield range(start, stop), torch.frombuffer(data, dtype=dtype).view(stop - start, -1)


def _union(cuts: tuple[Cut, ...]) -> list[range]:
    """The rows that are in any cut, as ascending ranges."""
    found: list[range] = []
    for rows in sorted({rows for cut in cuts for rows in cut.rows}, key=lambda rows: (rows.start, rows.stop)):
        if found and rows.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, rows.stop))
        else:
            found.append(rows)
    return found


def _emit(tensor: Tensor, writer: Writer, bar: Bar) -> None:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    writer.write(data.data)
    bar.advance(data.nbytes)
