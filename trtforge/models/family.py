"""The vocabulary in which a model family is written: rows of a table, no code that touches a tensor.

A family is a tuple of rows. Each names a TensorRT-LLM tensor (or linear layer), the Hugging Face tensors it is made
of, their sizes by name, and how tensor parallelism cuts it. Conversion, the planner's sizes and calibration all
read the same rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from trtforge.formats.hf import HfConfig

Size = Literal["hidden", "q", "kv", "intermediate", "vocab"]
"""Sizes of a model by name; `q` and `kv` are heads x head_size."""

Fact = Literal["attn_bias", "mlp_bias"]
"""Facts that decide whether an optional row exists."""


class Split(Enum):
    """How tensor parallelism cuts a (out, in) matrix, as TensorRT-LLM names it."""

    REPLICATE = "every rank has all of it"
    COLUMN = "rows (out) are cut, biases too"
    ROW = "columns (in) are cut, biases are replicated"
    HEADS = "rows are cut by attention head; KV heads are repeated where there are fewer than ranks"
    VOCAB = "rows are cut after zero-padding to a multiple of tp"
    EMBEDDING = "replicated, unless the parallel embedding is on"


class Place(Enum):
    """Which pipeline stage holds a row."""

    LAYER = "the stage that has the layer; layers are renumbered from 0 in each stage"
    FIRST = "the first stage"
    LAST = "the last stage"


@dataclass(frozen=True)
class Part:
    """One Hugging Face module that a row is made of, with its number of output features."""

    module: str
    out: Size


@dataclass(frozen=True)
class Linear:
    """A linear layer: `target.weight` (out, in) from the parts' weights, stacked; biases likewise where `bias` holds.

    `shares_input` and `shares_scale` name the row whose input, and whose FP8 scales, this layer has too.
    """

    target: str
    parts: tuple[Part, ...]
    inputs: Size
    split: Split
    bias: Fact | None = None
    shares_scale: str | None = None
    shares_input: str | None = None
    place: Place = Place.LAYER
    quantized: bool = True


@dataclass(frozen=True)
class Vector:
    """A one-dimensional weight, replicated: the gain of a normalisation."""

    target: str
    source: str
    size: Size
    place: Place = Place.LAYER


@dataclass(frozen=True)
class Embedding:
    """A (vocab, hidden) table; `tied` names the tensor that stands in where the model ties it and leaves it out."""

    target: str
    source: str
    split: Split
    place: Place
    tied: str | None = None


Row = Linear | Vector | Embedding


@dataclass(frozen=True)
class Sizes:
    """The numbers of one model. Lengths are in elements or tokens."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden: int
    intermediate: int
    vocab: int
    max_positions: int

    def of(self, size: Size) -> int:
        """A size by its name in the table."""
        match size:
            case "q":
                return self.num_heads * self.head_size
            case "kv":
                return self.num_kv_heads * self.head_size
            case _:
                return int(getattr(self, size))


@dataclass(frozen=True)
class Facts:
    """What config.json says of one model: sizes, the optional rows' conditions and the TensorRT-LLM config fields."""

    sizes: Sizes
    attn_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    config: Mapping[str, Any]

    def holds(self, fact: Fact | None) -> bool:
        """Whether an optional row (or bias) exists; no condition holds always."""
        return fact is None or bool(getattr(self, fact))


@dataclass(frozen=True)
class Family:
    """A table with its facts. `architectures`: Hugging Face's class name to TensorRT-LLM's."""

    name: str
    architectures: Mapping[str, str]
    layer_prefix: str
    layer: tuple[Row, ...]
    model: tuple[Row, ...]
    dropped: tuple[str, ...]
    facts: Callable[[HfConfig], Facts]

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of a decoder layer that may be quantised."""
        return tuple(row for row in self.layer if isinstance(row, Linear) and row.quantized)
