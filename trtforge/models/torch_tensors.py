"""Torch tensors in safetensors files: reading (copied, so that no page of a file stays mapped), writing, checking."""

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
    """The whole tensor in its stored dtype. Raises ForgeError for a file that cannot be read."""
    dtype = TORCH[stored.spec.dtype.name]
    if stored.spec.nbytes == 0:
        return torch.empty(stored.spec.shape, dtype=dtype)
    data = bytearray(stored.spec.nbytes)
    reader.read_bytes(stored, 0, memoryview(data))
    return torch.frombuffer(data, dtype=dtype).view(stored.spec.shape)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. Raises ForgeError if the disk is full or not writable."""
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise ForgeError(f"{path}: {error}", hint="Free space or choose another directory, then run again.") from None


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite.

    A finite sum proves it; if the sum overflows, the extremes decide. On a CPU `isfinite` takes thirty times as long.
    """
    return bool(tensor.sum().isfinite()) or bool(tensor.amax().isfinite() & tensor.amin().isfinite())
