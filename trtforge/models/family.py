"""The vocabulary in which a model family is written: rows of a table, no code that touches a tensor.

A family is a tuple of rows. Each names a TensorRT-LLM tensor (or linear layer), the Hugging Face tensors it is made
of, their sizes by name, and how tensor parallelism cuts it. Conversion, the inverse, the planner's sizes and
calibration all read the same rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from trtforge.core.dtypes import ModelDtype
from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfConfig

Size = Literal[
    "hidden", "q", "kv", "intermediate", "vocab", "positions", "head", "one", "experts", "moe_intermediate",
    "shared_intermediate", "q_lora", "kv_lora", "kv_a", "q_b", "k_nope", "v_mla", "q_pe",
]  # fmt: skip
"""Sizes of a model by name. `q` and `kv` are heads x head_size; those after `shared_intermediate` are of MLA."""

Fact = Literal[
    "qkv_bias", "dense_bias", "mlp_bias", "qk_norm", "one_norm", "two_norms", "sequential", "final_norm", "q_lora",
    "no_q_lora", "sparse_layer", "dense_layer", "shared_layer",
]  # fmt: skip
"""What decides whether an optional row (or bias) exists; the last three hold for some layers and not for others."""


ParallelEmbedding = Literal["as_asked", "when_split", "always"]


class Split(Enum):
    """How tensor parallelism cuts a (out, in) matrix, as TensorRT-LLM names it."""

    REPLICATE = "every rank has all of it"
    COLUMN = "rows (out) are cut, biases too"
    ROW = "columns (in) are cut, biases are replicated"
    HEADS = "rows are cut by attention head; KV heads are repeated where there are fewer than ranks"
    VOCAB = "rows are cut after zero-padding to a multiple of tp"
    EMBEDDING = "replicated, unless the parallel embedding is on"


class PipelineStage(Enum):
    """Which pipeline stage holds a row."""

    LAYER = "the stage that has the layer; layers are renumbered from 0 in each stage"
    FIRST = "the first stage"
    LAST = "the last stage"


@dataclass(frozen=True)
class Stacked:
    """The part's rows inside a module that stacks several: those `before` it come first, `of` are all of them."""

    before: tuple[Size, ...]
    of: tuple[Size, ...]


@dataclass(frozen=True)
class Grouped:
    """Rows of a module that holds, for every KV head, its query heads, its key and its value: [q ... q k v].

    With as many KV heads as heads this is the per-head [q k v] of GPT-NeoX and Bloom.
    """

    which: Literal["q", "k", "v"]


@dataclass(frozen=True)
class PerHead:
    """Rows of a module that holds for every head first one thing, then another: MLA's kv_b_proj."""

    before: tuple[Size, ...]
    of: tuple[Size, ...]


Rows = Stacked | Grouped | PerHead


@dataclass(frozen=True)
class Part:
    """Output features that a row takes from one Hugging Face module: all of its rows, or those that `rows` says."""

    module: str
    out: Size
    rows: Rows | None = None


@dataclass(frozen=True)
class Linear:
    """A linear layer: `target.weight` (out, in) from the parts' weights, stacked; biases likewise where `bias` holds.

    `shares_input` and `shares_scale` name the row whose input, and whose FP8 scales, this layer has too. `conv1d`:
    the source is (in, out). `bare`: the tensor has no `.weight` suffix. `zero_bias`: a row-parallel bias is on rank
    0 and zeros elsewhere, because the network adds it before the sum over ranks.
    """

    target: str
    parts: tuple[Part, ...]
    inputs: Size
    split: Split
    bias: Fact | None = None
    shares_scale: str | None = None
    shares_input: str | None = None
    place: PipelineStage = PipelineStage.LAYER
    quantized: bool = True
    when: Fact | None = None
    conv1d: bool = False
    bare: bool = False
    zero_bias: bool = False
    dtype: ModelDtype | None = None


@dataclass(frozen=True)
class Experts:
    """A linear layer of every expert: `target.weight` (experts, out, in). `{}` in a part's module is the expert."""

    target: str
    parts: tuple[Part, ...]
    inputs: Size
    split: Split
    shares_input: str | None = None
    when: Fact | None = "sparse_layer"


@dataclass(frozen=True)
class Vector:
    """A small tensor that every rank has, such as a normalisation's gain; `plus_one`: stored as value + 1.

    `heads`: of (heads, head_size) instead, cut by head.
    """

    target: str
    source: str
    size: Size
    place: PipelineStage = PipelineStage.LAYER
    plus_one: bool = False
    when: Fact | None = None
    heads: Literal["q", "kv"] | None = None


@dataclass(frozen=True)
class Embedding:
    """A (rows, hidden) table; `tied` names the tensor that stands in where the model ties it and leaves it out.

    `skip` first rows of the source are left out.
    """

    target: str
    source: str
    split: Split
    place: PipelineStage
    tied: str | None = None
    rows: Size = "vocab"
    skip: int = 0


@dataclass(frozen=True)
class HeadBias:
    """The (vocab,) bias of the output head, cut and padded as its matrix."""

    target: str
    source: str
    when: Fact | None = None
    place: PipelineStage = PipelineStage.LAST


@dataclass(frozen=True)
class AbsorbedQuery:
    """MLA's fused_q_proj (heads x (kv_lora + rope), q_lora): queries times key decompression, and the rotary rows.

    Source: tensorrt_llm/models/deepseek_v2/convert.py (0.17). `query` and `key` are Hugging Face modules.
    """

    target: str
    query: str
    key: str
    inputs: Size
    when: Fact | None = None


Row = Linear | Experts | Vector | Embedding | HeadBias | AbsorbedQuery


def layer_norm(
    target: str,
    source: str,
    *,
    place: PipelineStage = PipelineStage.LAYER,
    when: Fact | None = None,
    plus_one: bool = False,
) -> tuple[Vector, Vector]:
    """Gain and bias of a LayerNorm over the hidden size; `plus_one` is for the gain."""
    return (
        Vector(f"{target}.weight", f"{source}.weight", "hidden", place, plus_one, when),
        Vector(f"{target}.bias", f"{source}.bias", "hidden", place, when=when),
    )


def fused_qkv(module: str, rows: Literal["stacked", "grouped"]) -> tuple[Part, Part, Part]:
    """Query, key and value out of one module."""
    if rows == "grouped":
        return Part(module, "q", Grouped("q")), Part(module, "kv", Grouped("k")), Part(module, "kv", Grouped("v"))
    of: tuple[Size, ...] = ("q", "kv", "kv")
    return (
        Part(module, "q", Stacked((), of)),
        Part(module, "kv", Stacked(("q",), of)),
        Part(module, "kv", Stacked(("q", "kv"), of)),
    )


@dataclass(frozen=True)
class Sizes:
    """The numbers of one model. Lengths are in elements or tokens; `more` holds those that few families have."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden: int
    intermediate: int
    vocab: int
    max_positions: int
    more: Mapping[Size, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.head_size < 1:
            raise ForgeError(
                f"config.json: {self.num_heads} heads of a hidden size of {self.hidden} have no element each",
                hint="Use the config.json that came with the model.",
            )
        if self.num_kv_heads > self.num_heads:
            raise ForgeError(
                f"config.json: {self.num_kv_heads} key-value heads are more than the {self.num_heads} attention heads",
                hint="Use the config.json that came with the model.",
            )

    def of(self, size: Size) -> int:
        """A size by its name in the table."""
        match size:
            case "q":
                return self.num_heads * self.head_size
            case "kv":
                return self.num_kv_heads * self.head_size
            case "head":
                return self.head_size
            case "one":
                return 1
            case "hidden" | "intermediate" | "vocab":
                return int(getattr(self, size))
            case "positions":
                return self.max_positions
            case _:
                return self.more[size]

    def total(self, sizes: tuple[Size, ...]) -> int:
        """Sum of sizes."""
        return sum(self.of(size) for size in sizes)

    def heads_of(self, size: Size) -> int:
        """Over how many heads a part of this size is spread."""
        return self.num_kv_heads if size == "kv" else self.num_heads


@dataclass(frozen=True)
class Facts:
    """What config.json says of one model: sizes, the optional rows' conditions and the TensorRT-LLM config fields."""

    sizes: Sizes
    tied_embeddings: bool
    config: Mapping[str, Any]
    holding: frozenset[Fact] = frozenset()
    sparse_layers: frozenset[int] = frozenset()

    def holds(self, fact: Fact | None, layer: int = 0) -> bool:
        """Whether an optional row (or bias) exists in a layer; no condition holds always."""
        match fact:
            case None:
                return True
            case "sparse_layer":
                return layer in self.sparse_layers
            case "dense_layer":
                return layer not in self.sparse_layers
            case "shared_layer":
                return layer in self.sparse_layers and self.sizes.more.get("shared_intermediate", 0) > 0
            case _:
                return fact in self.holding


def holding(**conditions: bool) -> frozenset[Fact]:
    """The facts that are true."""
    return frozenset(name for name, holds in conditions.items() if holds)  # type: ignore[misc]


@dataclass(frozen=True)
class Family:
    """A table with its facts. `architectures`: Hugging Face's class name to TensorRT-LLM's.

    `dropped`: endings of source tensors that carry nothing (tables that the network computes for itself).
    `parallel_embedding`: whether TensorRT-LLM's network insists on it. `base_prefix`: checkpoints of the bare model,
    without its head, leave this out of every name (`stripped`, in their family). `modules_renamed`: what
    `transformers` 5 calls a layer's modules, where that differs from checkpoints, to what checkpoints call them.
    """

    name: str
    architectures: Mapping[str, str]
    layer_prefix: str
    layer: tuple[Row, ...]
    model: tuple[Row, ...]
    facts: Callable[[HfConfig], Facts]
    dropped: tuple[str, ...] = ()
    parallel_embedding: ParallelEmbedding = "as_asked"
    base_prefix: str = ""
    stripped: str = ""
    modules_renamed: Mapping[str, str] = field(default_factory=dict)

    def bare(self) -> "Family":
        """The same family as checkpoints of the bare model name it."""
        strip = self.base_prefix

        def renamed(row: Row) -> Row:
            if isinstance(row, Embedding):
                tied = row.tied.removeprefix(strip) if row.tied else None
                return replace(row, source=row.source.removeprefix(strip), tied=tied)
            return replace(row, source=row.source.removeprefix(strip)) if isinstance(row, Vector) else row

        model = tuple(renamed(row) for row in self.model)
        prefix = self.layer_prefix.removeprefix(strip)
        return replace(self, layer_prefix=prefix, model=model, base_prefix="", stripped=strip)

    @property
    def layer_path(self) -> str:
        """Where `transformers` keeps the decoder layers in the whole model."""
        return self.stripped + self.layer_prefix

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of a decoder layer that may be quantised."""
        return tuple(row for row in self.layer if isinstance(row, Linear) and row.quantized)

    @property
    def experts(self) -> tuple[Experts, ...]:
        """The layers that every expert has."""
        return tuple(row for row in self.layer if isinstance(row, Experts))
