"""Stored tensors as torch's, read into memory of their own: no page of a file stays mapped."""

import torch
from torch import Tensor

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
