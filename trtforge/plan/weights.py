"""The weights of every rank, layer by layer, in any number format, derived from the plan of a model's tensors.

Layers of one kind (dense or with experts, with attention or linear attention) are alike, so only one of each kind is
planned.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from trtforge.core.dtypes import FLOAT32_BYTES
from trtforge.core.parallel import Parallel
from trtforge.models.checkpoint_plan import Layout, checkpoint_plan
from trtforge.models.content import Target
from trtforge.models.family import AbsorbedQuery, Embedding, Experts, Facts, Family, Linear, PipelineStage, Row
from trtforge.plan.formats import WeightFormat


@dataclass(frozen=True)
class Stored:
    """How weights are stored: a format, the bytes of the model's dtype, and the group size of grouped formats.

    `bits`: for mixed precision whose formats are not chosen yet, the upper limit of the mean bits of a weight with
    scales.
    """

    format: WeightFormat
    itemsize: int
    group_size: int = 128
    bits: float | None = None

    def nbytes(self, count: int, out: int, inputs: int) -> int:
        """Bytes of `count` (out, in) matrices with their scales."""
        if self.bits is None:
            return self.format.nbytes(count, out, inputs, self.itemsize, self.group_size)
        unbudgeted = count * self.format.per_input_elements * inputs * self.itemsize + 2 * FLOAT32_BYTES
        return ceil(count * out * inputs * self.bits / 8) + unbudgeted


@dataclass(frozen=True)
class Matrix:
    """`count` matrices (out, inputs) of a rank; `name`: of their layer in a checkpoint.

    `formatted`: stored in the number format, else with `itemsize` bytes a weight. `own`: its format in mixed precision.
    `expert`: of an expert, of which a token uses only some. `head`: the LM head. `absorbed`: the product of two others,
    for the generation phase of MLA. `exact`: always in a dtype that the family fixes.
    """

    count: int
    out: int
    inputs: int
    itemsize: int
    name: str = ""
    formatted: bool = False
    expert: bool = False
    head: bool = False
    absorbed: bool = False
    exact: bool = False
    own: WeightFormat | None = None

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.count * self.out * self.inputs

    def nbytes(self, stored: Stored) -> int:
        """Bytes with scales."""
        if self.formatted and self.own is not None:
            return self.own.nbytes(self.count, self.out, self.inputs, stored.itemsize, stored.group_size)
        if self.formatted or (self.head and stored.format.quantizes_head):
            return stored.nbytes(self.count, self.out, self.inputs)
        return self.weights * self.itemsize


@dataclass(frozen=True)
class Block:
    """A decoder layer, or the weights before or after all layers. `other`: bytes of embeddings, norms and biases."""

    matrices: tuple[Matrix, ...] = ()
    other: int = 0

    def nbytes(self, stored: Stored) -> int:
        """Bytes as they are stored."""
        return self.other + sum(matrix.nbytes(stored) for matrix in self.matrices)

    def with_formats(self, formats: Mapping[str, WeightFormat]) -> "Block":
        """This block with the formats of the named matrices; format none leaves them unquantised."""
        given = (
            replace(matrix, own=own, formatted=matrix.formatted and own.bits is not None)
            if (own := formats.get(matrix.name)) is not None
            else matrix
            for matrix in self.matrices
        )
        return replace(self, matrices=tuple(given))


@dataclass(frozen=True)
class RankWeights:
    """The weights of a tensor-parallel rank; all ranks have the same shapes. `layers`: the index of each layer's kind
    in `kinds`."""

    first: Block
    kinds: tuple[Block, ...]
    layers: tuple[int, ...]
    last: Block

    def blocks(self, parallel: Parallel, stage: int) -> Iterator[tuple[Block, int]]:
        """The kinds of blocks in one pipeline stage, and the number of each."""
        if stage == 0:
            yield self.first, 1
        held = Counter(self.layers[layer] for layer in parallel.layers_of(stage, len(self.layers)))
        yield from ((self.kinds[kind], count) for kind, count in sorted(held.items()))
        if stage == parallel.pp - 1:
            yield self.last, 1

    def nbytes(self, stored: Stored, parallel: Parallel, stage: int) -> int:
        """Bytes of a rank of one pipeline stage."""
        return sum(block.nbytes(stored) * count for block, count in self.blocks(parallel, stage))

    def with_formats(self, formats: Sequence[Mapping[str, WeightFormat]]) -> "RankWeights":
        """These weights with the formats of the named matrices of each layer."""
        found = [(kind, frozenset(own.items())) for kind, own in zip(self.layers, formats, strict=True)]
        kinds = sorted(set(found), key=found.index)
        blocks = tuple(self.kinds[kind].with_formats(dict(own)) for kind, own in kinds)
        return replace(self, kinds=blocks, layers=tuple(kinds.index(layer) for layer in found))


def rank_weights(family: Family, facts: Facts, layout: Layout) -> RankWeights:
    """The weights of a tensor-parallel rank of a legal layout; its pipeline and number formats are ignored."""
    linear = facts.sizes.linear_layers
    each = [(layer in facts.sparse_layers, layer in linear) for layer in range(facts.sizes.num_layers)]
    kinds = sorted(set(each))
    one_of_each = replace(
        facts,
        sizes=replace(
            facts.sizes,
            num_layers=len(kinds),
            linear_layers=frozenset(index for index, (_, is_linear) in enumerate(kinds) if is_linear),
        ),
        sparse_layers=frozenset(index for index, (has_experts, _) in enumerate(kinds) if has_experts),
    )
    plain = replace(layout, parallel=replace(layout.parallel, pp=1, cp=1), quant="none", kv_cache="none", source=None)
    targets = checkpoint_plan(family, one_of_each, plain).targets
    first, last = (
        tuple(row for row in family.model if getattr(row, "place", None) is place)
        for place in (PipelineStage.FIRST, PipelineStage.LAST)
    )
    return RankWeights(
        first=_block(targets, "", first),
        kinds=tuple(_block(targets, f"transformer.layers.{index}.", family.layer) for index in range(len(kinds))),
        layers=tuple(kinds.index(kind) for kind in each),
        last=_block(targets, "", last),
    )


def _block(targets: tuple[Target, ...], prefix: str, rows: tuple[Row, ...]) -> Block:
    matrices = {prefix + tensor_name(row): row for row in rows if _multiplied(row)}
    others = {f"{prefix}{row.target}{part}" for row in rows for part in ("", ".weight", ".bias")} - set(matrices)
    return Block(
        matrices=tuple(
            _matrix(target, matrices[target.spec.name]) for target in targets if target.spec.name in matrices
        ),
        other=sum(target.spec.nbytes for target in targets if target.spec.name in others),
    )


def _matrix(target: Target, row: Row) -> Matrix:
    *stacked, out, inputs = target.spec.shape
    return Matrix(
        count=stacked[0] if stacked else 1,
        out=out,
        inputs=inputs,
        itemsize=target.spec.dtype.size,
        name=row.target,
        formatted=isinstance(row, Experts) or (isinstance(row, Linear) and row.quantized),
        expert=isinstance(row, Experts),
        head=isinstance(row, Embedding),
        absorbed=isinstance(row, AbsorbedQuery),
        exact=isinstance(row, Linear) and row.dtype is not None,
    )


def _multiplied(row: Row) -> bool:
    """Whether activations are multiplied with the row's tensor; the input embedding is looked up."""
    return isinstance(row, Linear | Experts | AbsorbedQuery) or (
        isinstance(row, Embedding) and row.place is PipelineStage.LAST
    )


def tensor_name(row: Row) -> str:
    """The name of a row's tensor in its layer."""
    named_weight = isinstance(row, Experts) or (isinstance(row, Linear) and not row.bare)
    return f"{row.target}.weight" if named_weight else row.target
