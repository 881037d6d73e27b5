"""Expand a family's table and a layout into every tensor of every rank: name, dtype, shape and content.

No file is read, so the plan of a 405B model takes milliseconds. `convert` executes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from trtforge.core.dtypes import ModelDtype, dtype_named
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import KvCacheFormat, QuantFormat
from trtforge.formats.quantized_source import QuantizedSource
from trtforge.formats.shards import TensorSpec
from trtforge.models.content import Absorbed, Cast, Content, KvScale, Piece, Target, WeightOnly, pieces_of
from trtforge.models.exclusions import excluded_modules
from trtforge.models.expert_split import expert_cuts
from trtforge.models.family import (
    AbsorbedQuery,
    Embedding,
    ExpertBias,
    Experts,
    Facts,
    Family,
    HeadBias,
    Linear,
    Part,
    PipelineStage,
    Row,
    Split,
    Vector,
)
from trtforge.models.formats import FORMATS
from trtforge.models.part_rows import module_rows, part_cuts, part_rows
from trtforge.models.prequantized_experts import QuantizedLayers
from trtforge.models.prequantized_targets import attention_module, require_separate
from trtforge.models.quantized_targets import Matrix, quantized_targets
from trtforge.models.split import Cut, column_cuts, head_cuts, row_cuts, whole_cuts
from trtforge.models.stored_parts import StoredSources

FLOAT32 = dtype_named("float32")


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is written. `source`: the quantisation of an already quantised source, which `quant` matches.

    `exclude_modules`: patterns of Hugging Face names of linear layers that are not quantised. `shared_pre_quant_scale`:
    linears that read one input share a scale even if engines run them separately (gate, up). `formats`: in mixed
    precision, the linear layers, by full Hugging Face name, whose format is not `quant`. `compensated`: for a
    weight-only format, a calibration contains the codes that TensorRT-LLM's build must find.
    """

    parallel: Parallel
    dtype: ModelDtype
    quant: QuantFormat = "none"
    kv_cache: KvCacheFormat = "none"
    group_size: int = 128
    parallel_embedding: bool = False
    embedding_sharding_dim: int = 0
    shared_pre_quant_scale: bool = False
    source: QuantizedSource | None = None
    exclude_modules: tuple[str, ...] = ()
    formats: tuple[tuple[str, QuantFormat], ...] = ()
    compensated: bool = False

    @property
    def mixed(self) -> bool:
        """Whether quantised linear layers have different formats."""
        return bool(self.formats) or (self.source is not None and self.source.mixed)


@dataclass(frozen=True)
class CheckpointPlan:
    """All targets in file order, and every source tensor with the shape it must have.

    `ties`: tied LM heads (a source may store them anyway), mapped to the embeddings to which they are tied. `stored`:
    the tensors that an already quantised source must have.
    """

    targets: tuple[Target, ...]
    sources: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    stored: StoredSources = field(default_factory=StoredSources)


def shards_embedding(family: Family, layout: Layout) -> bool:
    """Whether the embedding is parallel: on request, or because TensorRT-LLM's network requires it."""
    match family.parallel_embedding:
        case "always":
            return True
        case "when_split":
            return layout.parallel_embedding or layout.parallel.tp > 1
        case "as_asked":
            return layout.parallel_embedding


def checkpoint_plan(family: Family, facts: Facts, layout: Layout) -> CheckpointPlan:
    """Expand the table. The layout must be legal for the model (plan.legality).

    Raises ForgeError for a quantised source whose matrices cannot be split or fused for this layout, and for modules
    that cannot be excluded (models.exclusions).
    """
    if layout.source:
        require_separate(family, facts, layout.source)
    planner = _Planner(family, facts, layout)
    targets = tuple(planner.targets())
    sources: dict[str, tuple[int, ...]] = {}
    for target in targets:
        for piece in pieces_of(target.content):
            sources[piece.source] = piece.shape
    heads = [row for row in family.model if isinstance(row, Embedding) and facts.tied_embeddings]
    stored = planner.stored.sources if planner.stored else StoredSources()
    return CheckpointPlan(targets, sources, {row.source: row.tied for row in heads if row.tied}, stored)


class _Planner:
    def __init__(self, family: Family, facts: Facts, layout: Layout) -> None:
        self.family, self.facts, self.layout = family, facts, layout
        self.sizes, self.tp, self.dtype = facts.sizes, layout.parallel.tp, dtype_named(layout.dtype)
        self.stored = QuantizedLayers(layout.source, self.dtype) if layout.source else None
        self.format = FORMATS[layout.quant]
        self.rounds = self.format.rounding is not None and not self.stored
        self.excluded = excluded_modules(family, facts, layout.exclude_modules)
        self.formats = dict(layout.formats)

    def targets(self) -> Iterator[Target]:
        pp = self.layout.parallel.pp
        for stage in range(pp):
            if stage == 0:
                yield from self._model_rows(PipelineStage.FIRST, stage)
            for local, layer in enumerate(self.layout.parallel.layers_of(stage, self.sizes.num_layers)):
                prefix, source = f"transformer.layers.{local}.", f"{self.family.layer_prefix}.{layer}."
                for row in self.family.layer:
                    if self.facts.holds(getattr(row, "when", None), layer):
                        yield from self._row(row, prefix, source, stage)
                if self.layout.kv_cache != "none" and layer not in self.sizes.linear_layers:
                    spec = TensorSpec(prefix + "attention.kv_cache_scaling_factor", FLOAT32, (1,))
                    content: Content = KvScale(layer, self.layout.kv_cache)
                    if self.stored and self.layout.kv_cache == "fp8":
                        content = self.stored.kv_scale(source + attention_module(self.family))
                    yield Target(spec, stage, content)
            if stage == pp - 1:
                yield from self._model_rows(PipelineStage.LAST, stage)

    def _model_rows(self, place: PipelineStage, stage: int) -> Iterator[Target]:
        for row in self.family.model:
            if getattr(row, "place", None) is place and self.facts.holds(getattr(row, "when", None)):
                yield from self._row(row, "", "", stage)

    def _row(self, row: Row, prefix: str, source: str, stage: int) -> Iterator[Target]:
        match row:
            case Vector():
                yield self._vector(row, prefix, source, stage)
            case Embedding():
                yield self._embedding(row, stage)
            case HeadBias():
                yield self._head_bias(row, stage)
            case AbsorbedQuery():
                yield self._absorbed(row, prefix, source, stage)
            case Experts():
                yield from self._experts(row, prefix, source, stage)
            case ExpertBias():
                yield self._expert_bias(row, prefix, source, stage)
            case Linear():
                yield from self._linear(row, prefix, source, stage)

    def _vector(self, row: Vector, prefix: str, source: str, stage: int) -> Target:
        shape: tuple[int, ...] = (self.sizes.of(row.size),)
        cuts = whole_cuts((range(shape[0]),), 1, self.tp)
        if row.split is Split.COLUMN:
            cuts = column_cuts(range(shape[0]), 1, self.tp)
        if row.heads:
            heads, size = self.sizes.heads_of(row.heads), shape[0]
            shape = (heads,) if row.size == "one" else (heads, size)
            cuts = head_cuts(lambda head: range(head, head + 1), heads, size, self.tp)
        piece = Piece(source + row.source, shape, cuts)
        return self._cast(
            prefix + row.target, (piece,), (cuts[0].height, *shape[1:]), stage, plus_one=row.plus_one, dtype=row.dtype
        )

    def _embedding(self, row: Embedding, stage: int) -> Target:
        rows, hidden = self.sizes.of(row.rows), self.sizes.hidden
        source = row.tied if row.tied and self.facts.tied_embeddings else row.source
        shape, taken = (row.skip + rows, hidden), range(row.skip, row.skip + rows)
        sharded = row.split is Split.EMBEDDING and shards_embedding(self.family, self.layout)
        if sharded and self.layout.embedding_sharding_dim == 1:
            piece = Piece(source, shape, row_cuts(taken, hidden, self.tp))
            return self._cast(row.target, (piece,), (rows, hidden // self.tp), stage)
        if sharded or row.split is Split.VOCAB:
            return self._padded(row.target, source, shape, taken, stage)
        piece = Piece(source, shape, whole_cuts((taken,), hidden, self.tp))
        return self._cast(row.target, (piece,), (rows, hidden), stage)

    def _head_bias(self, row: HeadBias, stage: int) -> Target:
        vocab = self.sizes.vocab
        return self._padded(row.target, row.source, (vocab,), range(vocab), stage)

    def _padded(self, name: str, source: str, shape: tuple[int, ...], rows: range, stage: int) -> Target:
        """Cut by rows after zero-padding them to a multiple of tp."""
        each = -(-len(rows) // self.tp)
        cuts = column_cuts(rows, shape[1] if len(shape) > 1 else 1, self.tp, rows_each=each)
        padding = tuple(each - cut.height for cut in cuts)
        return self._cast(name, (Piece(source, shape, cuts),), (each, *shape[1:]), stage, padding)

    def _absorbed(self, row: AbsorbedQuery, prefix: str, source: str, stage: int) -> Target:
        sizes, heads = self.sizes, self.sizes.num_heads
        nope, rope, value = (sizes.of(name) // heads for name in ("k_nope", "q_pe", "v_mla"))
        columns, lora = sizes.of(row.inputs), sizes.of("kv_lora")

        def whole(module: str, rows: int, columns: int) -> Piece:
            shape = (rows, columns)
            return Piece(f"{source}{module}.weight", shape, whole_cuts((range(rows),), columns, self.tp))

        each = heads // self.tp
        content = Absorbed(
            whole(row.query, heads * (nope + rope), columns),
            whole(row.key, heads * (nope + value), lora),
            tuple(range(rank * each, (rank + 1) * each) for rank in range(self.tp)),
            nope,
            rope,
            value,
        )
        return Target(TensorSpec(prefix + row.target, self.dtype, (each * (lora + rope), columns)), stage, content)

    def _experts(self, row: Experts, prefix: str, source: str, stage: int) -> Iterator[Target]:
        """(experts of a rank, rows, columns): the parts of one expert, then those of the next."""
        sizes, ep = self.sizes, self.layout.parallel.ep
        experts, columns = sizes.of("experts"), sizes.of(row.inputs)
        pieces: list[Piece] = []
        groups = [tuple(source + part.module.format(expert) for part in row.parts) for expert in range(experts)]
        for expert, modules in enumerate(groups):
            for part, module in zip(row.parts, modules, strict=True):
                shape = (module_rows(self.sizes, part), columns)
                cut = row_cuts if row.split is Split.ROW else column_cuts
                cuts = expert_cuts(expert, experts, cut(part_rows(self.sizes, part), columns, self.tp // ep), ep)
                pieces.append(Piece(f"{module}.weight", shape[::-1] if row.stacked else shape, cuts, row.stacked))
        height = sum(piece.cuts[0].height for piece in pieces[: len(row.parts)])
        name, each, width = prefix + row.target, experts // ep, len(pieces[0].cuts[0].cols)
        readers = tuple(dict.fromkeys(module for modules in groups for module in modules))
        if row.stacked:
            groups = [readers] * experts
        of_rank = [tuple(groups[rank % ep * each : (rank % ep + 1) * each]) for rank in range(self.tp)]
        shared = tuple(modules for modules in groups for _ in row.parts)
        matrix = Matrix(name, tuple(pieces), (height, width), shared, readers, tuple(of_rank), each)
        if self.stored:
            yield from self.stored.experts(matrix, stage)
            return
        if not self.rounds:
            stack = (each, height, width)
            if self._weight_only(tuple(module for modules in groups for module in modules)):
                yield Target(TensorSpec(f"{name}.weight", self.dtype, stack), stage, WeightOnly(tuple(pieces)))
            else:
                yield self._cast(f"{name}.weight", tuple(pieces), stack, stage)
            return
        yield from quantized_targets(matrix, self.format, self.layout.group_size, self.dtype, stage)

    def _expert_bias(self, row: ExpertBias, prefix: str, source: str, stage: int) -> Target:
        """(experts of a rank, out). If outputs are summed, the first rank of an expert has the bias, others zeros."""
        experts, out, ep = self.sizes.of("experts"), self.sizes.of(row.out), self.layout.parallel.ep
        each, shares = experts // ep, self.tp // ep
        summed = row.split is Split.ROW
        width = out if summed else out // shares
        cuts: list[Cut] = []
        padding: list[int] = []
        for rank in range(self.tp):
            group, part = rank % ep, rank // ep
            held = not summed or part == 0
            first = 0 if summed else part * width
            rows = (range(group * each, (group + 1) * each),) if held else ()
            cuts.append(Cut(rows, range(first, first + width)))
            padding.append(0 if held else each)
        piece = Piece(source + row.source, (experts, out), tuple(cuts))
        return self._cast(prefix + row.target, (piece,), (each, width), stage, tuple(padding))

    def _linear(self, row: Linear, prefix: str, source: str, stage: int) -> Iterator[Target]:
        columns = self.sizes.of(row.inputs)
        weights = tuple(self._weight(row, part, source, columns) for part in row.parts)
        name, modules = prefix + row.target, tuple(source + part.module for part in row.parts)
        shape = (sum(piece.cuts[0].height for piece in weights), len(weights[0].cuts[0].cols))
        biased = row.bias is not None and self.facts.holds(row.bias)
        scaled = tuple(source + part.module for r in self._scaled_with(row) for part in r.parts)
        wanted = FORMATS[self.formats.get(modules[0], self.layout.quant)]
        if self.stored and row.quantized and self.stored.takes(modules):
            yield from self.stored.linear(name, weights, scaled, stage, biased=biased)
        elif row.quantized and self.rounds and wanted.rounding and not self.excluded.issuperset(modules):
            shared = (scaled if wanted.rounding in ("fp8", "nvfp4") else modules,) * len(weights)
            readers = modules
            if self.layout.shared_pre_quant_scale:
                readers = tuple(source + part.module for r in self._reading_with(row) for part in r.parts)
            matrix = Matrix(name, weights, shape, shared, readers, ((shared[0],),) * self.tp)
            yield from quantized_targets(matrix, wanted, self.layout.group_size, self.dtype, stage)
        elif row.quantized and self._weight_only(modules):
            yield Target(TensorSpec(f"{name}.weight", self.dtype, shape), stage, WeightOnly(weights))
        else:
            suffix = "" if row.bare else ".weight"
            yield self._cast(f"{name}{suffix}", weights, shape, stage, dtype=row.dtype)
        if biased:
            yield self._bias(row, name, source, stage)

    def _weight_only(self, modules: tuple[str, ...]) -> bool:
        """Whether TensorRT-LLM's build must find a calibration's codes in the weights of `modules`."""
        return self.layout.compensated and self.format.rounding is None and not self.excluded.issuperset(modules)

    def _weight(self, row: Linear, part: Part, source: str, columns: int) -> Piece:
        rows, cuts = module_rows(self.sizes, part), self._cuts(row, part, columns)
        shape = (columns, rows) if row.conv1d else (rows, 1, columns) if row.depthwise else (rows, columns)
        return Piece(f"{source}{part.module}.weight", shape, cuts, row.conv1d)

    def _bias(self, row: Linear, name: str, source: str, stage: int) -> Target:
        """Biases are split with the outputs; a row-parallel one is added after the all-reduce, so all ranks hold it."""
        pieces, padding = [], (0,) * self.tp
        for part in row.parts:
            cuts = self._cuts(row, part, 1)
            if row.split is Split.ROW:
                (rows,) = whole_cuts((part_rows(self.sizes, part),), 1, 1)
                cuts = (rows,) * self.tp
                if row.zero_bias:
                    cuts = (rows, *(Cut((), range(1)),) * (self.tp - 1))
                    padding = (0, *(rows.height,) * (self.tp - 1))
            pieces.append(Piece(f"{source}{part.module}.bias", (module_rows(self.sizes, part),), cuts))
        height = sum(piece.cuts[0].height for piece in pieces)
        return self._cast(f"{name}.bias", tuple(pieces), (height,), stage, padding)

    def _scaled_with(self, row: Linear) -> tuple[Linear, ...]:
        """The rows that share FP8 scales with `row`, itself included."""
        leader = row.shares_scale or row.target
        return tuple(r for r in self.family.linears if (r.shares_scale or r.target) == leader)

    def _reading_with(self, row: Linear) -> tuple[Linear, ...]:
        """The rows that read the same input as `row`, itself included."""
        leader = row.shares_input or row.target
        return tuple(r for r in self.family.linears if (r.shares_input or r.target) == leader)

    def _cuts(self, row: Linear, part: Part, columns: int) -> tuple[Cut, ...]:
        return part_cuts(self.sizes, row, part, columns, self.tp)

    def _cast(
        self,
        name: str,
        pieces: tuple[Piece, ...],
        shape: tuple[int, ...],
        stage: int,
        padding: tuple[int, ...] = (),
        *,
        plus_one: bool = False,
        dtype: ModelDtype | None = None,
    ) -> Target:
        spec = TensorSpec(name, dtype_named(dtype) if dtype else self.dtype, shape)
        return Target(spec, stage, Cast(pieces, padding or (0,) * self.tp, plus_one))
