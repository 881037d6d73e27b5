"""The row types that describe a model family as a table; no code here touches a tensor.

Each row names a TensorRT-LLM tensor (or linear layer), its Hugging Face source tensors, their sizes by name, and its
tensor-parallel split. Conversion, its inverse, the planner's sizes and calibration all read the same rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from trtforge.core.dtypes import ModelDtype
from trtforge.core.errors import ForgeError
from trtforge.formats.hf import ITS_OWN_CONFIG, HfConfig

_MOST_DIGITS = 6  # in a layer's number

Size = Literal[
    "hidden", "q", "kv", "intermediate", "vocab", "positions", "head", "one", "experts", "moe_intermediate",
    "gate_up", "shared_intermediate", "q_lora", "kv_lora", "kv_a", "q_b", "k_nope", "v_mla", "q_pe", "linear_k",
    "linear_v", "linear_qkvz", "linear_ba", "linear_groups", "linear_heads", "linear_head", "conv_kernel",
]  # fmt: skip
"""Sizes of a model by name. `q` and `kv` are heads x head_size; those after `shared_intermediate` are MLA's, those from
`linear_k` on linear attention's: `linear_groups` are its key heads, `linear_heads` its value heads of `linear_head`.

`gate_up`: 2 x moe_intermediate, for experts whose gate and up projections are one matrix with alternating rows.
"""

Fact = Literal[
    "qkv_bias", "dense_bias", "mlp_bias", "qk_norm", "one_norm", "two_norms", "sequential", "final_norm", "q_lora",
    "no_q_lora", "router_bias", "sparse_layer", "dense_layer", "shared_layer", "linear_layer", "attention_layer",
]  # fmt: skip
"""Conditions for optional rows (or biases); the last five differ between layers."""


ParallelEmbedding = Literal["as_asked", "when_split", "always"]


class Split(Enum):
    """How tensor parallelism cuts a (out, in) matrix, by TensorRT-LLM's names."""

    REPLICATE = "every rank has all of it"
    COLUMN = "rows (out) are cut, biases too"
    ROW = "columns (in) are cut, biases are replicated"
    HEADS = "rows are cut by attention head; KV heads are repeated where there are fewer than ranks"
    VOCAB = "rows are cut after zero-padding to a multiple of tp"
    EMBEDDING = "replicated, unless the parallel embedding is on"


class PipelineStage(Enum):
    """The pipeline stage of a row."""

    LAYER = "the stage that has the layer; layers are renumbered from 0 in each stage"
    FIRST = "the first stage"
    LAST = "the last stage"


@dataclass(frozen=True)
class Stacked:
    """The part's position in a module that stacks several: `before` are the sizes before it, `of` all sizes."""

    before: tuple[Size, ...]
    of: tuple[Size, ...]


@dataclass(frozen=True)
class Grouped:
    """Rows of a module with, for every KV head, its query heads, its key and its value: [q ... q k v].

    With as many KV heads as query heads this is the per-head [q k v] of GPT-NeoX and Bloom.
    """

    which: Literal["q", "k", "v"]


@dataclass(frozen=True)
class PerHead:
    """The part's position within each head's rows, as in MLA's kv_b_proj; fields as in Stacked."""

    before: tuple[Size, ...]
    of: tuple[Size, ...]


Rows = Stacked | Grouped | PerHead


@dataclass(frozen=True)
class Part:
    """Output features that a row takes from one Hugging Face module: all of its rows, or those given by `rows`."""

    module: str
    out: Size
    rows: Rows | None = None


@dataclass(frozen=True)
class Linear:
    """A linear layer: `target.weight` (out, in) from the parts' weights, stacked; biases likewise if the fact `bias` is
    true.

    `shares_input` and `shares_scale` name the row whose input and whose FP8 scales this layer shares. `conv1d`: the
    source is (in, out). `depthwise`: the source is (out, 1, in), a convolution of each channel by itself. `bare`: the
    tensor has no `.weight` suffix. `zero_bias`: a row-parallel bias is on rank 0 and zeros elsewhere, because the
    network adds it before the all-reduce.
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
    depthwise: bool = False
    bare: bool = False
    zero_bias: bool = False
    dtype: ModelDtype | None = None


@dataclass(frozen=True)
class Experts:
    """A linear layer of every expert: `target.weight` (experts, out, in). `{}` in a module: the expert's number.

    `stacked`: the checkpoint has the experts in one tensor (experts, in, out), and one scale of FP8 and NVFP4 for all
    (formats.stacked_experts reads it as matrices (in, out)). `all_tokens`: in `transformers` every expert gets all
    tokens, multiplied by their scores, which are zero if the expert was not chosen.
    """

    target: str
    parts: tuple[Part, ...]
    inputs: Size
    split: Split
    shares_input: str | None = None
    when: Fact | None = "sparse_layer"
    stacked: bool = False
    all_tokens: bool = False


@dataclass(frozen=True)
class ExpertBias:
    """The biases (experts, out) of a linear layer of every expert, cut like its matrices.

    In a row-parallel layer, only the first of the ranks that share an expert has them and the others have zeros,
    because the ranks' outputs are summed.
    """

    target: str
    source: str
    out: Size
    split: Split
    when: Fact | None = "sparse_layer"


@dataclass(frozen=True)
class Vector:
    """A small tensor on every rank, such as a normalisation's weight. `plus_one`: TensorRT-LLM stores value + 1.

    `heads`: its shape is (heads, head_size) instead, or (heads,) if its size is `one`, split by head. `split` COLUMN:
    each rank has an equal share.
    """

    target: str
    source: str
    size: Size
    place: PipelineStage = PipelineStage.LAYER
    plus_one: bool = False
    when: Fact | None = None
    heads: Literal["q", "kv"] | None = None
    split: Split = Split.REPLICATE
    dtype: ModelDtype | None = None


@dataclass(frozen=True)
class Embedding:
    """A (rows, hidden) table. `tied`: the source tensor if the model ties its embeddings.

    `skip`: number of leading rows of the source to drop.
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
    """The (vocab,) bias of the LM head, split and padded like its matrix."""

    target: str
    source: str
    when: Fact | None = None
    place: PipelineStage = PipelineStage.LAST


@dataclass(frozen=True)
class AbsorbedQuery:
    """MLA's fused_q_proj (heads x (kv_lora + rope), q_lora): query times key up-projection, then the rotary rows.

    Source: tensorrt_llm/models/deepseek_v2/convert.py (0.17). `query` and `key` are Hugging Face modules.
    """

    target: str
    query: str
    key: str
    inputs: Size
    when: Fact | None = None


Row = Linear | Experts | ExpertBias | Vector | Embedding | HeadBias | AbsorbedQuery


def layer_norm(
    target: str,
    source: str,
    *,
    place: PipelineStage = PipelineStage.LAYER,
    when: Fact | None = None,
    plus_one: bool = False,
) -> tuple[Vector, Vector]:
    """Weight and bias of a LayerNorm over the hidden size; `plus_one` applies to the weight."""
    return (
        Vector(f"{target}.weight", f"{source}.weight", "hidden", place, plus_one, when),
        Vector(f"{target}.bias", f"{source}.bias", "hidden", place, when=when),
    )


@dataclass(frozen=True)
class Sizes:
    """The dimensions of one model, in elements or tokens; `more`: sizes of few families.

    `linear_layers`: the layers with linear attention, which keep a state per sequence instead of keys and values.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden: int
    intermediate: int
    vocab: int
    max_positions: int
    more: Mapping[Size, int] = field(default_factory=dict)
    linear_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.head_size < 1:
            raise ForgeError(
                f"config.json: hidden size {self.hidden} is too small for {self.num_heads} attention heads",
                hint=ITS_OWN_CONFIG,
            )
        if self.num_kv_heads > self.num_heads:
            raise ForgeError(
                f"config.json: {self.num_kv_heads} key-value heads are more than the {self.num_heads} attention heads",
                hint=ITS_OWN_CONFIG,
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
        """The number of heads in a part of this size."""
        return self.num_kv_heads if size == "kv" else self.num_heads


@dataclass(frozen=True)
class Facts:
    """The facts in one model's config.json: sizes, conditions of optional rows, and the TensorRT-LLM config fields."""

    sizes: Sizes
    tied_embeddings: bool
    config: Mapping[str, Any]
    holding: frozenset[Fact] = frozenset()
    sparse_layers: frozenset[int] = frozenset()

    def holds(self, fact: Fact | None, layer: int = 0) -> bool:
        """Whether an optional row (or bias) exists in a layer; always if `fact` is None."""
        match fact:
            case None:
                return True
            case "sparse_layer":
                return layer in self.sparse_layers
            case "dense_layer":
                return layer not in self.sparse_layers
            case "shared_layer":
                return layer in self.sparse_layers and self.sizes.more.get("shared_intermediate", 0) > 0
            case "linear_layer":
                return layer in self.sizes.linear_layers
            case "attention_layer":
                return layer not in self.sizes.linear_layers
            case _:
                return fact in self.holding


def holding(**conditions: bool) -> frozenset[Fact]:
    """The facts that are true."""
    return frozenset(name for name, holds in conditions.items() if holds)  # type: ignore[misc]


@dataclass(frozen=True)
class Family:
    """A table with its facts. `architectures`: Hugging Face's class name to TensorRT-LLM's.

    `dropped`: suffixes of source tensors to ignore (buffers that the network computes itself). `parallel_embedding`:
    whether TensorRT-LLM's network requires it. `base_prefix`: prefix that checkpoints of the base model, without LM
    head, omit from every name; `bare` moves it to `stripped`. `modules_renamed`: a layer's module names in
    `transformers` 5, mapped to those in checkpoints if they differ. `engines`: whether a TensorRT-LLM release builds
    engines of it; otherwise only its LLM API runs it. Tensors copied unchanged into an LLM API model: `carries_layers`:
    of layers after the decoder's (multi-token prediction), `predictor`: their prefix if they have their own, `carried`:
    prefixes of others. `nested`: prefix of the language model's tensors in a multimodal checkpoint; config.json has it
    as text_config.
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
    engines: bool = True
    carries_layers: bool = False
    predictor: str = ""
    carried: tuple[str, ...] = ()
    nested: str = ""

    def carries(self, name: str, num_layers: int) -> bool:
        """Whether a source tensor is copied instead of converted."""
        if name.startswith((*self.carried, self.predictor or "\0")):
            return True
        number = name.removeprefix(f"{self.layer_prefix}.").partition(".")[0]
        numbered = number.isdecimal() and len(number) <= _MOST_DIGITS
        behind = self.carries_layers and name.startswith(f"{self.layer_prefix}.") and numbered
        return behind and int(number) >= num_layers

    def bare(self) -> "Family":
        """The family with the tensor names of base model checkpoints."""
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
        """Path of the decoder layers in the `transformers` model."""
        return self.stripped + self.layer_prefix.removeprefix(self.nested)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of a decoder layer that may be quantised."""
        return tuple(row for row in self.layer if isinstance(row, Linear) and row.quantized)

    @property
    def experts(self) -> tuple[Experts, ...]:
        """The linear layers of each expert."""
        return tuple(row for row in self.layer if isinstance(row, Experts))
