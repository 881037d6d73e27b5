"""Reads the tensors of one rank file one by one; missing, misshapen and unexpected tensors are errors."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.formats.shards import RowReader, read_header
from trtforge.formats.tensor_files import map_tensors
from trtforge.formats.trtllm import rank_file
from trtforge.models.torch_tensors import read_tensor
from trtforge.models.transforms import TORCH

UNREAD = frozenset(
    {
        *("embed_positions", "embed_positions_for_gpt_attention", "rotary_inv_freq"),
        *("embed_positions_local", "embed_positions_for_gpt_attention_local", "rotary_inv_freq_local"),
        *("k_cache_scaling_factor", "v_cache_scaling_factor"),
    }
)
"""Last parts of the names of tensors that other converters write and TensorRT-LLM's networks do not need.

TensorRT-LLM's converters dump the tables that its networks compute from config.json (layers/attention.py). ModelOpt
writes the scaling factors of keys and values beside their maximum, `kv_cache_scaling_factor`, which alone is read.
"""
_FLOATING = (torch.float16, torch.bfloat16, torch.float32)


class _Reader(Protocol):
    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class _InMemory:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


class _Headers:
    """Tensors without values."""

    def __init__(self, path: Path) -> None:
        self._stored = {tensor.spec.name: tensor.spec for tensor in read_header(path)}

    def keys(self) -> list[str]:
        return list(self._stored)

    def get_tensor(self, name: str) -> Tensor:
        spec = self._stored[name]
        return torch.empty(spec.shape, dtype=TORCH[spec.dtype.name], device="meta")


class _Streamed:
    def __init__(self, path: Path, reader: RowReader) -> None:
        self._stored = {tensor.spec.name: tensor for tensor in read_header(path)}
        self._reader = reader

    def keys(self) -> list[str]:
        return list(self._stored)

    def get_tensor(self, name: str) -> Tensor:
        return read_tensor(self._reader, self._stored[name])


class Weights:
    """The tensors of a rank, each read by `take`."""

    def __init__(self, where: str, reader: _Reader, close: Callable[[], None] = lambda: None) -> None:
        self.where, self.close = where, close
        self._reader = reader
        self._names = set(reader.keys())
        self._left = set(self._names)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], where: str = "packed weights") -> "Weights":
        """Tensors that are in memory."""
        return cls(where, _InMemory(tensors))

    @classmethod
    def stream(cls, directory: Path, index: int) -> "Weights":
        """Like `open`, but without memory mapping: memory is freed with each tensor taken. Needs `close`."""
        path, reader = directory / rank_file(index), RowReader()
        return cls(str(path), _Streamed(path, reader), reader.close)

    @classmethod
    def open(cls, directory: Path, index: int) -> "Weights":
        """The memory-mapped file of rank `index` in a checkpoint or engine.

        Raises ForgeError if it is missing or damaged.
        """
        path = directory / rank_file(index)
        return cls(str(path), map_tensors(path))

    @classmethod
    def headers(cls, directory: Path, index: int) -> "Weights":
        """Names, shapes and dtypes of a rank file, on the meta device."""
        path = directory / rank_file(index)
        return cls(str(path), _Headers(path))

    def has(self, name: str) -> bool:
        """Whether the rank has this tensor."""
        return name in self._names

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor, which must have `shape` if one is given. Raises ForgeError naming the file and the tensor."""
        if name not in self._names:
            raise self._missing(name)
        self._left.discard(name)
        tensor = self._reader.get_tensor(name)
        if shape and tuple(tensor.shape) != shape:
            raise ForgeError(
                f"{self.where}: {name} has shape {tuple(tensor.shape)}, {shape} is expected",
                hint="config.json and the weights do not match: create the directory again.",
            )
        return tensor

    def leave(self, name: str) -> None:
        """Skip a tensor that is read elsewhere. Raises ForgeError if it is missing."""
        if name not in self._names:
            raise self._missing(name)
        self._left.discard(name)

    def take_as(self, name: str, dtypes: Collection[torch.dtype], *shape: int) -> Tensor:
        """Like `take`, for a tensor of one of these dtypes. Raises ForgeError for another dtype."""
        tensor = self.take(name, *shape)
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ForgeError(
                f"{self.where}: {name} is {str(tensor.dtype).removeprefix('torch.')}, {wanted} is expected",
                hint="config.json and the weights do not match: create the directory again.",
            )
        return tensor

    def take_floating(self, name: str, *shape: int) -> Tensor:
        """Like `take`, for float16, bfloat16 or float32. Raises ForgeError for another dtype."""
        return self.take_as(name, _FLOATING, *shape)

    def take_scalar(self, name: str) -> Tensor:
        """A scaling factor, stored with or without a dimension, as float32 (1,)."""
        tensor = self.take_floating(name)
        if tensor.numel() != 1:
            raise ForgeError(
                f"{self.where}: {name} has shape {tuple(tensor.shape)}, one number is expected",
                hint="config.json and the weights do not match: create the directory again.",
            )
        return tensor.float().reshape(1)

    def _missing(self, name: str) -> ForgeError:
        hint = "config.json and the weights do not match: create the directory again."
        return ForgeError(f"{self.where}: {name} is missing", hint=hint)

    def finish(self) -> None:
        """Raises ForgeError naming tensors that were not taken, apart from those that no network needs (`UNREAD`)."""
        names = sorted(name for name in self._left if name.rpartition(".")[2] not in UNREAD)
        if names:
            raise ForgeError(
                f"{self.where}: {len(names)} unexpected tensors: {', '.join(names[:4])}",
                hint="config.json and the weights do not match, or the embedded engine lacks this feature.",
            )
