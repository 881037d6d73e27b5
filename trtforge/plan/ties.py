"""Output heads that config.json ties to the embedding, but that are stored too: told before hours are spent."""

from collections.abc import Iterator, Mapping

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.shards import RowReader, StoredTensor

_SLAB = 16 << 20  # bytes that are compared at once


def require_equal_heads(checkpoint: HfCheckpoint, ties: Mapping[str, str]) -> None:
    """Raises ForgeError for a stored head that is not, byte for byte, the table it is tied to; `ties`: head to table.

    TensorRT-LLM takes the table then, `transformers` 5 the head: the model would answer differently.
    """
    for head, table in ties.items():
        if head not in checkpoint.tensors:
            continue
        if not _equal(checkpoint.tensors[head], checkpoint.tensors[table]):
            raise ForgeError(
                f"{checkpoint.directory}: config.json ties {head} to {table}, but it is stored too, and differs",
                hint='Set "tie_word_embeddings": false in config.json if the stored head is meant, as `transformers` '
                "takes it; else leave that tensor out.",
            )


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.spec.shape, one.spec.dtype) != (other.spec.shape, other.spec.dtype):
        return False
    with RowReader() as reader:
        return all(mine == others for mine, others in zip(_slabs(reader, one), _slabs(reader, other), strict=True))


def _slabs(reader: RowReader, tensor: StoredTensor) -> Iterator[bytearray]:
    for first in range(0, tensor.spec.nbytes, _SLAB):
        slab = bytearray(min(_SLAB, tensor.spec.nbytes - first))
        reader.read_bytes(tensor, first, memoryview(slab))
        yield slab
