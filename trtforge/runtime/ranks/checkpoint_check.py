"""Checks a checkpoint's rank files: names, shapes and dtypes against the network of its config.json, and values."""

from collections.abc import Iterator
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.formats.eagle_checkpoint import eagle_in
from trtforge.formats.finite import first_nonfinite, is_nan
from trtforge.formats.shards import RowReader, StoredTensor, read_header
from trtforge.formats.trtllm import CheckpointConfig, rank_file
from trtforge.models.torch_tensors import read_tensor
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.linears.packing import require_rank
from trtforge.runtime.linears.weights import Weights

_SLAB_BYTES = 16 << 20
_SCALES = ("scaling_factor", "scaling_factor_2", "per_channel_scale")
_DIVISORS = ("activation_scaling_factor", "kv_cache_scaling_factor")
"""Scales that values are divided by, so they must not be zero."""
_MAKE_AGAIN = "The quantisation or the copy failed: make the checkpoint again."


def unchecked_network(config: CheckpointConfig) -> str | None:
    """Why the tensors of a checkpoint cannot be checked: the embedded engine does not support its network or its EAGLE
    network. None if they can be checked."""
    try:
        for rank in config.parallel.ranks:
            DecoderSpec.of(config, rank.index)
        eagle_in(config)
    except ForgeError as error:
        return error.message
    return None


def require_network(config: CheckpointConfig, directory: Path, index: int) -> int:
    """The number of tensors of a rank. Raises ForgeError naming a missing, unexpected, misshapen or mistyped tensor."""
    require_rank(config, index, Weights.headers(directory, index))
    return len(read_header(directory / rank_file(index)))


def nonfinite_weights(directory: Path, index: int) -> Iterator[str]:
    """The tensors of a rank file with NaN or infinite weights.

    Raises ForgeError for a scaling factor that is not finite, is negative, or is zero where values are divided by it.
    """
    with RowReader() as reader:
        for stored in read_header(directory / rank_file(index)):
            found = _first_nonfinite(reader, stored)
            name = stored.spec.name
            is_scale = name.endswith(_SCALES)
            if found is not None and is_scale:
                raise ForgeError(f"{stored.file}: {name} holds {found}", hint=_MAKE_AGAIN)
            if found is not None:
                yield f"{stored.file.name}: {name} holds {found}"
            elif is_scale and stored.spec.nbytes:
                _require_scale(reader, stored)


def _require_scale(reader: RowReader, stored: StoredTensor) -> None:
    least = float(read_tensor(reader, stored).float().min())
    if least < 0 or (least == 0 and stored.spec.name.endswith(_DIVISORS)):
        wanted = "positive" if stored.spec.name.endswith(_DIVISORS) else "zero or more"
        raise ForgeError(
            f"{stored.file}: {stored.spec.name} holds {least:g}, a scaling factor is {wanted}", hint=_MAKE_AGAIN
        )


def _first_nonfinite(reader: RowReader, stored: StoredTensor) -> str | None:
    """The first non-finite value and its position, as text; None if all values are finite."""
    size, total = stored.spec.dtype.size, stored.spec.nbytes
    for first in range(0, total, _SLAB_BYTES):
        part = memoryview(bytearray(min(_SLAB_BYTES, total - first)))
        data = reader.read_bytes(stored, first, part)
        found = first_nonfinite(data, stored.spec.dtype)
        if found is not None:
            value = "NaN" if is_nan(data, stored.spec.dtype, found) else "an infinity"
            return f"{value} at element {first // size + found:,}"
    return None
