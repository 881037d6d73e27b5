"""LM heads that config.json ties to the embedding although they are stored: checked before any long work."""

from collections.abc import Iterator, Mapping

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.shards import RowReader, StoredTensor

_SLAB = 16 << 20  # bytes compared at once


def require_equal_heads(checkpoint: HfCheckpoint, ties: Mapping[str, str]) -> None:
    """Raises ForgeError if a stored LM head differs from the embedding it is tied to; `ties`: head to embedding.

    TensorRT-LLM would use the embedding, `transformers` 5 the head, and their answers would differ.
    """
    for head, table in ties.items():
        if head not in checkpoint.tensors:
            continue
        if not _equal(checkpoint.tensors[head], checkpoint.tensors[table]):
            raise ForgeError(
                f"{checkpoint.directory}: config.json ties {head} to {table}, but a different {head} is stored",
                hint='Set "tie_word_embeddings": false in config.json to use the stored head, as `transformers` does; '
                "else remove that tensor.",
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
