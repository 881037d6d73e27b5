"""Tensors of a Hugging Face checkpoint, assembled from blocks of the tensors in TensorRT-LLM's rank files."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trtforge.core.errors import ForgeError
from trtforge.formats.shards import StoredTensor, TensorSpec

OF_THE_DIRECTORY = "Compile the Hugging Face checkpoint itself: `trtforge compile HF_DIR OUT --backend llmapi`."


@dataclass(frozen=True)
class Block:
    """Rows `rows` and columns `cols` of a tensor's (out, in) matrix, stored in a rank file from row `first` on.

    Rows of a three-dimensional tensor are numbered through all experts; a vector is one column.
    """

    rows: range
    cols: range
    stored: StoredTensor
    first: int

    @property
    def source(self) -> StoredTensor:
        """The block's bytes, as a stored matrix."""
        spec, width = self.stored.spec, len(self.cols)
        start = self.first * width * spec.dtype.size
        return StoredTensor(
            TensorSpec(spec.name, spec.dtype, (len(self.rows), width)), self.stored.file, self.stored.offset + start
        )


@dataclass(frozen=True)
class Blocks:
    """A tensor assembled from blocks. `transposed`: its file holds the (in, out) matrix.

    `minus_one`: the rank files store value + 1. `times`: a vector by which a normalisation's weight or bias is
    multiplied. Both are computed in float32 and rounded to the tensor's dtype; otherwise only the dtype may change.
    """

    blocks: tuple[Block, ...]
    transposed: bool = False
    minus_one: bool = False
    times: "Blocks | None" = None


@dataclass(frozen=True)
class Scalar:
    """One float32 of a tensor in a rank file."""

    stored: StoredTensor
    index: int


@dataclass(frozen=True)
class HfTensor:
    """One tensor of the Hugging Face checkpoint."""

    spec: TensorSpec
    content: "Blocks | Scalar | Stack"


@dataclass(frozen=True)
class Stack:
    """The tensors of experts, one after another."""

    experts: tuple[HfTensor, ...]


@dataclass(frozen=True)
class HfPlan:
    """All tensors in file order. `unquantized`: the modules whose matrix is not quantised, sorted.

    `algorithms`: of mixed precision, of the quantised modules.
    """

    tensors: tuple[HfTensor, ...]
    unquantized: tuple[str, ...]
    algorithms: Mapping[str, str] | None = None

    def __add__(self, other: "HfPlan") -> "HfPlan":
        """The tensors of both."""
        unquantized = tuple(sorted(self.unquantized + other.unquantized))
        return HfPlan(self.tensors + other.tensors, unquantized, self.algorithms)


def copied(tensors: Iterable[StoredTensor], patterns: tuple[str, ...] = ()) -> HfPlan:
    """A plan of tensors that are already in Hugging Face's form, with unquantised matrices.

    `patterns`: additional names of their modules.
    """
    found, modules = [], []
    for tensor in tensors:
        rows, *others = tensor.spec.shape or (1,)
        columns = math.prod(others)
        found.append(HfTensor(tensor.spec, Blocks((Block(range(rows), range(columns), tensor, 0),))))
        if len(tensor.spec.shape) == 2:
            modules.append(tensor.spec.name.removesuffix(".weight"))
    return HfPlan(tuple(found), (*modules, *patterns))


def cover(blocks: tuple[Block, ...], name: str, shape: tuple[int, int]) -> tuple[Block, ...]:
    """The blocks that make up the tensor, without replicas on other ranks. Raises ForgeError if one is missing."""
    kept: list[Block] = []
    for block in blocks:
        if not any(_inside(block, other) for other in kept):
            kept.append(block)
    if sum(len(block.rows) * len(block.cols) for block in kept) != shape[0] * shape[1]:
        raise ForgeError(f"{name} is incomplete in a TensorRT-LLM checkpoint", hint=OF_THE_DIRECTORY)
    return tuple(kept)


def _inside(block: Block, other: Block) -> bool:
    return (
        other.rows.start <= block.rows.start
        and block.rows.stop <= other.rows.stop
        and other.cols.start <= block.cols.start
        and block.cols.stop <= other.cols.stop
    )
