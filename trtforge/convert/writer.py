"""Executes a checkpoint plan: reads sources in row slabs and writes each rank file sequentially.

The rank files of a pipeline stage are written in lock step, so each source row is read once. Memory depends on the slab
size, not on the model or its largest tensor. Tensors that need no arithmetic are copied without loading torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trtforge.convert.finite import FiniteWeights, rounded_sources
from trtforge.convert.slabs import Slab, Slabs, absorbed_reads, piece_reads
from trtforge.core.digest import DigestThread, text_digest
from trtforge.core.dtypes import Dtype
from trtforge.core.manifest import FileRecord
from trtforge.core.partial import Finished, Group
from trtforge.core.progress import Bar, Progress
from trtforge.formats.calibration import Calibration
from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.shards import StoredTensor, TensorSpec, Writer, header_of
from trtforge.formats.trtllm import rank_file
from trtforge.models.checkpoint_plan import CheckpointPlan, Layout
from trtforge.models.content import (
    Absorbed,
    Cast,
    Content,
    Piece,
    Quantized,
    QuantizedScales,
    Repacked,
    Rescaled,
    StoredPreQuant,
    StoredRowScales,
    StoredScalar,
    StoredScalarRows,
    StoredScalars,
    StoredVector,
    Target,
    WeightOnly,
    sources_of,
)
from trtforge.models.split import Cut

if TYPE_CHECKING:
    from trtforge.convert.encode import Encode
    from trtforge.convert.quantize import Quantizer


@dataclass(frozen=True)
class PipelineStage:
    """The targets of one pipeline stage, and its rank files, which all hold these tensors."""

    targets: tuple[Target, ...]
    files: tuple[str, ...]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors of each file."""
        return tuple(target.spec for target in self.targets)

    @cached_property
    def bytes(self) -> int:
        """Size of all files."""
        return (len(header_of(self.specs)) + sum(spec.nbytes for spec in self.specs)) * len(self.files)


def pipeline_stages(plan: CheckpointPlan, layout: Layout) -> tuple[PipelineStage, ...]:
    """The plan, split into pipeline stages."""
    tp, pp = layout.parallel.tp, layout.parallel.pp
    return tuple(
        PipelineStage(
            tuple(target for target in plan.targets if target.pp_rank == stage),
            tuple(rank_file(stage * tp + rank) for rank in range(tp)),
        )
        for stage in range(pp)
    )


def write_checkpoint(
    stages: Sequence[PipelineStage],
    source: HfCheckpoint,
    dtype: Dtype,
    calibration: Calibration | None,
    out: Path,
    progress: Progress,
    *,
    allow_nonfinite: bool = False,
) -> dict[str, FileRecord]:
    """Write all rank files into `out`, except those that an interrupted run finished; returns the records of all.

    `dtype` is the model's. Afterwards the digests of all source tensors are known. Raises ForgeError for weights that
    are NaN or infinite, unless `allow_nonfinite`.
    """
    finished = Finished.read(out)
    contents = (target.content for stage in stages for target in stage.targets)
    finite = FiniteWeights(allowed=allow_nonfinite, rounded=rounded_sources(contents))
    records: dict[str, FileRecord] = {}
    with progress.bar("Converting", sum(stage.bytes for stage in stages), "B") as bar:
        for stage in stages:
            group = finished.group(stage.files)
            if group is not None and group.made_from == _made_from(stage, source):
                bar.advance(stage.bytes)
            else:
                files = _write_stage(stage, source, dtype, calibration, out, finite, bar)
                group = Group(made_from=_made_from(stage, source), files=files)
                finished.add(group)
            records |= group.files
    return records


def _made_from(stage: PipelineStage, source: HfCheckpoint) -> str:
    """Digest of all source tensors of a stage."""
    wanted = {name for target in stage.targets for name in sources_of(target.content)}
    names = sorted(wanted & set(source.tensors))
    return text_digest("\n".join(f"{name} {source.contents.of_tensor(name).hex()}" for name in names))


def _write_stage(
    stage: PipelineStage,
    source: HfCheckpoint,
    dtype: Dtype,
    calibration: Calibration | None,
    out: Path,
    finite: FiniteWeights,
    bar: Bar,
) -> dict[str, FileRecord]:
    with ExitStack() as opened:
        digests, writers = DigestThread(), []
        opened.callback(digests.close)
        for name in stage.files:
            writers.append(Writer(out / name, stage.specs, digests))
            opened.callback(writers[-1].close)
        contents = [target.content for target in stage.targets]
        slabs = opened.enter_context(Slabs(contents, source.tensors, source.contents, finite, digests.wait))
        execution = _Execution(source.tensors, dtype, calibration, writers, slabs, bar)
        for target in stage.targets:
            execution.write(target)
        bar.advance(len(header_of(stage.specs)) * len(writers))
        return {writer.path.name: writer.finish() for writer in writers}


@dataclass(frozen=True)
class _Execution:
    """Writes the targets of a pipeline stage in order, with one writer per rank."""

    sources: Mapping[str, StoredTensor]
    dtype: Dtype
    calibration: Calibration | None
    writers: Sequence[Writer]
    slabs: Slabs
    bar: Bar
    scales: dict[str, list[NDArray[np.uint8]]] = field(default_factory=dict)
    """Row and block scales of every rank by target name, kept from quantisation until their target is written."""

    def write(self, target: Target) -> None:
        """All ranks' parts of a target."""
        for writer in self.writers:
            writer.begin(target.spec.name)
        match target.content:
            case Cast(pieces=pieces, padding=padding) as content:
                encode = self._caster(target.spec, content)
                for piece in pieces:
                    self._piece(piece, encode)
                for rank, rows in enumerate(padding):
                    self._emit(np.zeros(rows * target.spec.row_bytes, np.uint8), rank)
            case WeightOnly(pieces=pieces):
                self._weight_only(target.spec, pieces)
            case Absorbed():
                self._absorbed(target.content, target.spec.dtype)
            case Quantized():
                self._quantized(target.content)
            case QuantizedScales():
                for rank, scales in enumerate(self.scales.pop(target.spec.name)):
                    self._emit(scales, rank)
            case Repacked() | Rescaled() as content:
                self._repacked(content)
            case (
                StoredScalar() | StoredScalars() | StoredScalarRows() | StoredRowScales() | StoredPreQuant() as content
            ):
                self._small(content)
            case _:
                self._computed(target.content)

    def _weight_only(self, target: TensorSpec, pieces: tuple[Piece, ...]) -> None:
        from trtforge.convert.weight_only import RoundedRows

        for piece in pieces:
            content = Cast((piece,), (0,) * len(self.writers))
            with RoundedRows(piece, self.calibration, target.dtype) as rounded:
                if not rounded.found:
                    self._piece(piece, self._caster(target, content))
                    continue
                for read in piece_reads(piece, self.sources):
                    self.slabs.take(read)
                    for rank, cut, rows in _shares(piece, read.rows):
                        self._emit(rounded.part(rows, cut), rank)

    def _piece(self, piece: Piece, encode: "Encode") -> None:
        dtype = self.sources[piece.source].spec.dtype
        for rank, part, cut in self._parts(piece):
            self._emit(encode(part, dtype, cut), rank)

    def _repacked(self, content: Repacked | Rescaled) -> None:
        from trtforge.convert.repacking import SmallTensors, piece_encoders

        encoders = piece_encoders(content, SmallTensors(self.sources))
        for piece, encode in zip(content.pieces, encoders, strict=True):
            self._piece(piece, encode)

    def _small(self, content: StoredVector) -> None:
        from trtforge.convert.repacking import SmallTensors, stored_vector

        small = SmallTensors(self.sources)
        for rank in range(len(self.writers)):
            self._emit(stored_vector(content, small, rank, self.dtype), rank)

    def _caster(self, target: TensorSpec, content: Cast) -> "Encode":
        dtypes = {self.sources[piece.source].spec.dtype for piece in content.pieces}
        if not content.plus_one and dtypes == {target.dtype}:
            return _unchanged
        from trtforge.convert.encode import caster

        return caster(target, content)

    def _quantized(self, content: Quantized) -> None:
        from trtforge.convert.quantize import Quantizer

        # One allocation: small arrays kept from every slab would fragment the heap and hold the memory of the slabs.
        size = content.scales.nbytes if content.scales else 0
        held, filled = [np.empty(size, np.uint8) for _ in self.writers], [0] * len(self.writers)
        if content.scales:
            self.scales[content.scales.name] = held
        with Quantizer(content, self.calibration, self.dtype) as quantizer:
            for rank, codes, scales in self._encoded(content, quantizer):
                if scales is not None:
                    held[rank][filled[rank] : filled[rank] + scales.size] = scales
                    filled[rank] += scales.size
                self._emit(codes, rank)

    def _encoded(
        self, content: Quantized, quantizer: "Quantizer"
    ) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[np.uint8] | None]]:
        """Rank, codes and scales of every rank and slab of a target."""
        for number, piece in enumerate(content.pieces):
            dtype = self.sources[piece.source].spec.dtype
            for read in piece_reads(piece, self.sources):
                slab = self.slabs.take(read)
                row_scales = quantizer.row_scales(slab, dtype)
                for rank, cut, rows in _shares(piece, read.rows):
                    inside = _inside(rows, read.rows)
                    part, own = slab[inside, cut.cols.start : cut.cols.stop], None
                    if row_scales is not None:
                        own = row_scales[inside]
                    yield rank, *quantizer.encode(number, part, dtype, cut, rows, own)

    def _absorbed(self, content: Absorbed, dtype: Dtype) -> None:
        from trtforge.convert.encode import absorbed

        sources = tuple(self.sources[piece.source].spec.dtype for piece in (content.query, content.key))
        for rank, heads in enumerate(content.heads):
            for head in heads:
                read_query, read_key = absorbed_reads(content, head)
                query = self.slabs.take(read_query).copy()
                key = self.slabs.take(read_key)
                self._emit(absorbed(query, key, sources, content.nope, dtype), rank)

    def _computed(self, content: Content) -> None:
        from trtforge.convert.encode import computed

        for rank in range(len(self.writers)):
            self._emit(computed(content, self.calibration, rank, self.dtype), rank)

    def _parts(self, piece: Piece) -> Iterator[tuple[int, Slab, Cut]]:
        """Rank, part and cut for every rank and slab of a piece."""
        for read in piece_reads(piece, self.sources):
            slab = self.slabs.take(read)
            for rank, cut, rows in _shares(piece, read.rows):
                yield rank, slab[_inside(rows, read.rows), cut.cols.start : cut.cols.stop], cut

    def _emit(self, data: NDArray[Any], rank: int) -> None:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self.writers[rank].write(flat.data)
        self.bar.advance(flat.nbytes)


def _shares(piece: Piece, within: range) -> Iterator[tuple[int, Cut, range]]:
    """Rank, cut and rows in `within` that the rank gets, in the rank's order."""
    for rank, cut in enumerate(piece.cuts):
        for rows in cut.rows:
            start, stop = max(rows.start, within.start), min(rows.stop, within.stop)
            if start < stop:
                yield rank, cut, range(start, stop)


def _inside(rows: range, within: range) -> slice:
    return slice(rows.start - within.start, rows.stop - within.start)


def _unchanged(part: Slab, dtype: Dtype, cut: Cut) -> Slab:
    return part
