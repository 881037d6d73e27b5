"""Tensors of a Hugging Face checkpoint as blocks of those in TensorRT-LLM's rank files."""

from dataclasses import dataclass

from trtforge.core.errors import ForgeError
from trtforge.formats.shards import StoredTensor, TensorSpec

OF_THE_DIRECTORY = "Compile the Hugging Face checkpoint itself: trtforge compile HF_DIR OUT --backend llmapi."


@dataclass(frozen=True)
class Block:
    """Rows `rows` and columns `cols` of a tensor's (out, in) matrix: rows from `first` on of a tensor in a rank file.

    A tensor of three dimensions counts its rows through all experts; a vector is one column.
    """

    rows: range
    cols: range
    stored: StoredTensor
    first: int

    @property
    def source(self) -> StoredTensor:
        """The block's own bytes, as a matrix."""
        spec, width = self.stored.spec, len(self.cols)
        start = self.first * width * spec.dtype.size
        return StoredTensor(
            TensorSpec(spec.name, spec.dtype, (len(self.rows), width)), self.stored.file, self.stored.offset + start
        )


@dataclass(frozen=True)
class Blocks:
    """A tensor put together from blocks; `transposed`: its file holds the (in, out) matrix.

    `minus_one`: what the checkpoint stores as value + 1. `times`: a vector that a normalisation's gain or bias is
    multiplied by. Both are computed in float32 and rounded to the tensor's dtype; else only the dtype may change.
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
    content: Blocks | Scalar


@dataclass(frozen=True)
class HfPlan:
    """All tensors in file order. `unquantized`: the modules with a matrix that is as it was, sorted."""

    tensors: tuple[HfTensor, ...]
    unquantized: tuple[str, ...]


def cover(blocks: tuple[Block, ...], name: str, shape: tuple[int, int]) -> tuple[Block, ...]:
    """The blocks that make up the tensor, without what other ranks hold too. Raises ForgeError if some is missing."""
    kept: list[Block] = []
    for block in blocks:
        if not any(_inside(block, other) for other in kept):
            kept.append(block)
    if sum(len(block.rows) * len(block.cols) for block in kept) != shape[0] * shape[1]:
        raise ForgeError(f"{name} is not whole in a TensorRT-LLM checkpoint", hint=OF_THE_DIRECTORY)
    return tuple(kept)


def _inside(block: Block, other: Block) -> bool:
    return (
        other.rows.start <= block.rows.start
        and block.rows.stop <= other.rows.stop
        and other.cols.start <= block.cols.start
        and block.cols.stop <= other.cols.stop
    )
