"""Tensors of files as torch's: read into memory of their own, so that no page of a file stays mapped, and checked."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.formats.shards import RowReader, StoredTensor
from trtforge.models.transforms import TORCH


def read_tensor(reader: RowReader, stored: StoredTensor) -> Tensor:
    """The whole tensor in the type that it is stored in. Raises ForgeError for a file that cannot be read."""
    dtype = TORCH[stored.spec.dtype.name]
    if stored.spec.nbytes == 0:
        return torch.empty(stored.spec.shape, dtype=dtype)
    data = bytearray(stored.spec.nbytes)
    reader.read_bytes(stored, 0, memoryview(data))
    return torch.frombuffer(data, dtype=dtype).view(stored.spec.shape)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. Raises ForgeError where the disk is full or cannot be written."""
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise ForgeError(f"{path}: {error}", hint="Free space or choose another directory, then run again.") from None


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite.

    A sum shows it, unless it overflows; extremes always do. On a CPU `isfinite` takes thirty times as long.
    """
    return bool(tensor.sum().isfinite()) or bool(tensor.amax().isfinite() & tensor.amin().isfinite())
