"""From a family's table and a layout to every tensor of every rank: name, dtype, shape, and what it is made of.

Nothing is read: the plan of a 405B model takes milliseconds. `convert` executes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trtforge.core.dtypes import ModelDtype, dtype_named
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import KvCacheFormat, QuantFormat
from trtforge.formats.shards import TensorSpec
from trtforge.formats.trtllm import UNQUANTIZED_MODULES, CheckpointConfig, Quantization
from trtforge.models.family import Embedding, Facts, Family, Linear, Part, Place, Row, Split, Vector
from trtforge.models.split import Cut, column_cuts, head_cuts, replicated_cuts, row_cuts

FLOAT32 = dtype_named("float32")
_KV_DTYPE_OF = {"none": None, "fp8": "FP8"}
_ALGORITHM_OF = {"none": None, "fp8": "FP8", "int4_awq": "W4A16_AWQ"}


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is to be written."""

    parallel: Parallel
    dtype: ModelDtype
    quant: QuantFormat = "none"
    kv_cache: KvCacheFormat = "none"
    group_size: int = 128
    parallel_embedding: bool = False
    embedding_sharding_dim: int = 0


@dataclass(frozen=True)
class Piece:
    """One source tensor of a target and, for each tensor-parallel rank, the part of it that the rank gets."""

    source: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]


@dataclass(frozen=True)
class Cast:
    """The pieces below one another, cast to the target's dtype, then `padding` rows of zeros for each rank."""

    pieces: tuple[Piece, ...]
    padding: tuple[int, ...]


@dataclass(frozen=True)
class Fp8Weight:
    """The pieces quantised to E4M3 with one scale for all `scaled_with` modules."""

    pieces: tuple[Piece, ...]
    scaled_with: tuple[str, ...]


@dataclass(frozen=True)
class Int4Weight:
    """The pieces times the inverse pre-quantisation scale of `modules`, in signed 4-bit, two rows a byte."""

    pieces: tuple[Piece, ...]
    modules: tuple[str, ...]
    group_size: int


@dataclass(frozen=True)
class Int4Scales:
    """The block scales that belong to an Int4Weight: one for `group_size` inputs of one output."""

    pieces: tuple[Piece, ...]
    modules: tuple[str, ...]
    group_size: int


@dataclass(frozen=True)
class WeightScale:
    """(1,) float32: largest weight magnitude of `modules` / 448."""

    modules: tuple[str, ...]


@dataclass(frozen=True)
class ActivationScale:
    """(1,) float32: largest input magnitude of `modules` / 448."""

    modules: tuple[str, ...]


@dataclass(frozen=True)
class PreQuantScale:
    """(in,) of the model's dtype: the runtime multiplies inputs by it; the mean over `modules` where they are many."""

    modules: tuple[str, ...]
    cuts: tuple[Cut, ...]


@dataclass(frozen=True)
class KvScale:
    """(1,) float32: largest key or value of a layer / 448, at least 1."""

    layer: int


Content = Cast | Fp8Weight | Int4Weight | Int4Scales | WeightScale | ActivationScale | PreQuantScale | KvScale


@dataclass(frozen=True)
class Target:
    """One tensor in the rank files of a pipeline stage: `spec` is alike on all its tensor-parallel ranks."""

    spec: TensorSpec
    pp_rank: int
    content: Content


@dataclass(frozen=True)
class CheckpointPlan:
    """All targets in file order, and every source tensor with the shape it must have."""

    targets: tuple[Target, ...]
    sources: dict[str, tuple[int, ...]]
    optional: frozenset[str]


def checkpoint_config(family: Family, facts: Facts, architecture: str, layout: Layout) -> CheckpointConfig:
    """The config.json of the checkpoint."""
    sizes = facts.sizes
    quantized = layout.quant != "none"
    return CheckpointConfig.model_validate(
        {
            "architecture": family.architectures[architecture],
            "dtype": layout.dtype,
            "logits_dtype": "float32",
            "vocab_size": sizes.vocab,
            "hidden_size": sizes.hidden,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_size": sizes.head_size,
            "intermediate_size": sizes.intermediate,
            "max_position_embeddings": sizes.max_positions,
            "use_parallel_embedding": layout.parallel_embedding,
            "embedding_sharding_dim": layout.embedding_sharding_dim,
            "tie_word_embeddings": facts.tied_embeddings,
            **facts.config,
            "mapping": layout.parallel.mapping(),
            "quantization": Quantization(
                quant_algo=_ALGORITHM_OF[layout.quant],
                kv_cache_quant_algo=_KV_DTYPE_OF[layout.kv_cache],
                group_size=layout.group_size,
                pre_quant_scale=layout.quant == "int4_awq",
                exclude_modules=list(UNQUANTIZED_MODULES) if quantized else None,
            ),
        }
    )


def checkpoint_plan(family: Family, facts: Facts, layout: Layout) -> CheckpointPlan:
    """Expand the table. The layout is legal for the model (plan.legality)."""
    planner = _Planner(family, facts, layout)
    targets = tuple(planner.targets())
    sources: dict[str, tuple[int, ...]] = {}
    for target in targets:
        for piece in getattr(target.content, "pieces", ()):
            sources[piece.source] = piece.shape
    last = tuple(row for row in family.model if isinstance(row, Embedding) and row.tied and facts.tied_embeddings)
    return CheckpointPlan(targets, sources, optional=frozenset(row.source for row in last))


class _Planner:
    def __init__(self, family: Family, facts: Facts, layout: Layout) -> None:
        self.family, self.facts, self.layout = family, facts, layout
        self.tp, self.dtype = layout.parallel.tp, dtype_named(layout.dtype)

    def targets(self) -> Iterator[Target]:
        pp = self.layout.parallel.pp
        for stage in range(pp):
            if stage == 0:
                yield from self._rows(Place.FIRST, stage)
            for local, layer in enumerate(self.layout.parallel.layers_of(stage, self.facts.sizes.num_layers)):
                prefix, source = f"transformer.layers.{local}.", f"{self.family.layer_prefix}.{layer}."
                for row in self.family.layer:
                    yield from self._row(row, prefix, source, stage)
                if self.layout.kv_cache == "fp8":
                    name = prefix + "attention.kv_cache_scaling_factor"
                    yield Target(TensorSpec(name, FLOAT32, (1,)), stage, KvScale(layer))
            if stage == pp - 1:
                yield from self._rows(Place.LAST, stage)

    def _rows(self, place: Place, stage: int) -> Iterator[Target]:
        for row in self.family.model:
            if row.place is place:
                yield from self._row(row, "", "", stage)

    def _row(self, row: Row, prefix: str, source: str, stage: int) -> Iterator[Target]:
        match row:
            case Vector():
                yield self._vector(row, prefix, source, stage)
            case Embedding():
                yield self._embedding(row, stage)
            case Linear():
                yield from self._linear(row, prefix, source, stage)

    def _vector(self, row: Vector, prefix: str, source: str, stage: int) -> Target:
        shape = (self.facts.sizes.of(row.size),)
        piece = Piece(source + row.source, shape, replicated_cuts(shape, self.tp))
        return self._cast(prefix + row.target, (piece,), shape, stage)

    def _embedding(self, row: Embedding, stage: int) -> Target:
        vocab, hidden = self.facts.sizes.vocab, self.facts.sizes.hidden
        shape = (vocab, hidden)
        source = row.tied if row.tied and self.facts.tied_embeddings else row.source
        padded = -(-vocab // self.tp)
        sharded = self.layout.parallel_embedding and row.split is Split.EMBEDDING
        if sharded and self.layout.embedding_sharding_dim == 1:
            cuts = row_cuts(shape, self.tp)
            return self._cast(row.target, (Piece(source, shape, cuts),), (vocab, hidden // self.tp), stage)
        if sharded or row.split is Split.VOCAB:
            cuts = column_cuts(shape, self.tp, rows_each=padded)
            padding = tuple(padded - len(cut.rows) for cut in cuts)
            return self._cast(row.target, (Piece(source, shape, cuts),), (padded, hidden), stage, padding)
        return self._cast(row.target, (Piece(source, shape, replicated_cuts(shape, self.tp)),), shape, stage)

    def _linear(self, row: Linear, prefix: str, source: str, stage: int) -> Iterator[Target]:
        sizes, columns = self.facts.sizes, self.facts.sizes.of(row.inputs)
        weights = tuple(
            Piece(f"{source}{part.module}.weight", shape, self._cuts(row, part, shape))
            for part in row.parts
            for shape in [(sizes.of(part.out), columns)]
        )
        name, modules = prefix + row.target, tuple(source + part.module for part in row.parts)
        shape = (sum(len(p.cuts[0].rows) for p in weights), len(weights[0].cuts[0].cols))
        match self.layout.quant if row.quantized else "none":
            case "none":
                yield self._cast(f"{name}.weight", weights, shape, stage)
            case "fp8":
                yield from self._fp8(row, name, weights, shape, source, stage)
            case "int4_awq":
                yield from self._int4(name, modules, weights, shape, stage)
        if row.bias is not None and self.facts.holds(row.bias):
            biases = tuple(
                Piece(f"{source}{part.module}.bias", vector, self._bias_cuts(row, part, vector))
                for part in row.parts
                for vector in [(sizes.of(part.out),)]
            )
            yield self._cast(f"{name}.bias", biases, (sum(len(p.cuts[0].rows) for p in biases),), stage)

    def _fp8(
        self, row: Linear, name: str, weights: tuple[Piece, ...], shape: tuple[int, int], source: str, stage: int
    ) -> Iterator[Target]:
        modules = tuple(source + part.module for r in self._scaled_with(row) for part in r.parts)
        spec = TensorSpec(f"{name}.weight", dtype_named("float8_e4m3fn"), shape)
        yield Target(spec, stage, Fp8Weight(weights, modules))
        for suffix, content in (("weights", WeightScale(modules)), ("activation", ActivationScale(modules))):
            yield Target(TensorSpec(f"{name}.{suffix}_scaling_factor", FLOAT32, (1,)), stage, content)

    def _int4(
        self, name: str, modules: tuple[str, ...], weights: tuple[Piece, ...], shape: tuple[int, int], stage: int
    ) -> Iterator[Target]:
        (out, inputs), group = shape, self.layout.group_size
        packed = TensorSpec(f"{name}.weight", dtype_named("int8"), (out // 2, inputs))
        scales = TensorSpec(f"{name}.weights_scaling_factor", FLOAT32, (out, inputs // group))
        prequant = TensorSpec(f"{name}.prequant_scaling_factor", self.dtype, (inputs,))
        yield Target(packed, stage, Int4Weight(weights, modules, group))
        yield Target(scales, stage, Int4Scales(weights, modules, group))
        yield Target(prequant, stage, PreQuantScale(modules, weights[0].cuts))

    def _scaled_with(self, row: Linear) -> tuple[Linear, ...]:
        """The rows that use one FP8 scale with `row`, itself included."""
        leader = row.shares_scale or row.target
        return tuple(r for r in self.family.linears if (r.shares_scale or r.target) == leader)

    def _cuts(self, row: Linear, part: Part, shape: tuple[int, int]) -> tuple[Cut, ...]:
        sizes = self.facts.sizes
        match row.split:
            case Split.HEADS:
                heads = sizes.num_heads if part.out == "q" else sizes.num_kv_heads
                return head_cuts(shape, heads, sizes.head_size, self.tp)
            case Split.COLUMN:
                return column_cuts(shape, self.tp)
            case Split.ROW:
                return row_cuts(shape, self.tp)
            case _:
                return replicated_cuts(shape, self.tp)

    def _bias_cuts(self, row: Linear, part: Part, shape: tuple[int]) -> tuple[Cut, ...]:
        """Biases follow the outputs; a row-parallel one is added once, after the all-reduce, so all ranks hold it."""
        if row.split is Split.ROW:
            return replicated_cuts(shape, self.tp)
        return self._cuts(row, part, (*shape, 1))

    def _cast(
        self, name: str, pieces: tuple[Piece, ...], shape: tuple[int, ...], stage: int, padding: tuple[int, ...] = ()
    ) -> Target:
        return Target(TensorSpec(name, self.dtype, shape), stage, Cast(pieces, padding or (0,) * self.tp))
