"""Loads a checkpoint's tensors into `transformers`' modules, one layer at a time, and maps their names.

`transformers` 5 keeps a layer's experts in two stacked tensors and renames Mixtral's block; both are handled here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.shards import RowReader, StoredTensor
from trtforge.models.family import Embedding, Experts, Family, Vector
from trtforge.models.torch_tensors import all_finite, read_tensor
from trtforge.models.transforms import TORCH
from trtforge.reference.chosen import compute_chosen

_GAP = 1 << 15  # gap in bytes between rows up to which reading is faster than skipping
Compact = Callable[[Tensor], Tensor]
"""Loads the embedding rows of a batch's token ids; returns the ids as indices of these rows."""


class LayerWeights:
    """Reads tensors in the computing dtype. Raises ForgeError for a tensor with NaN or infinity."""

    def __init__(self, checkpoint: HfCheckpoint, family: Family, device: torch.device, dtype: torch.dtype) -> None:
        self.directory, self.family, self.device, self.dtype = checkpoint.directory, family, device, dtype
        self._checkpoint = checkpoint
        self._reader = RowReader(checkpoint.contents.saw)
        self._vectors = {row.source for row in family.layer if isinstance(row, Vector)}
        self._experts = {row.target: row for row in family.experts}
        rows = [row for row in family.experts if row.all_tokens]
        self._computing_all = tuple(row.parts[0].module.partition(".{}")[0] for row in rows)

    def load(self, layer: nn.Module, index: int) -> nn.Module:
        """`layer` with the weights of decoder layer `index`, and the buffers that are stored, in their own type."""
        prefix = f"{self.family.layer_prefix}.{index}."
        state = {name: self._layer_tensor(name, prefix) for name, _ in layer.named_parameters()}
        buffers = ((name, buffer) for name, buffer in layer.named_buffers() if name in self._vectors)
        state |= {name: self._exact(prefix + name, buffer.dtype) for name, buffer in buffers}
        layer.load_state_dict(state, strict=False, assign=True)
        for name, module in layer.named_modules():
            if name.endswith(self._computing_all):
                compute_chosen(module)
        return layer

    @contextmanager
    def surroundings(self, base: nn.Module, path: str) -> Iterator[Compact]:
        """`base` with everything but its layers loaded; its names in the checkpoint start with `path`."""
        rows = [row for row in self.family.model if isinstance(row, Embedding)]
        table = next(row.source for row in rows if row.rows == "vocab" and row.tied is None)
        prefix = self.family.nested + f"{path}.".removeprefix(self.family.stripped)
        state = {}
        for name, parameter in base.named_parameters():
            if parameter.is_meta and prefix + name != table:
                state[name] = self._tensor(prefix + name)
        base.load_state_dict(state, strict=False, assign=True)
        module: Any = base.get_submodule(table.removeprefix(prefix).removesuffix(".weight"))

        def compact(ids: Tensor) -> Tensor:
            wanted, positions = torch.unique(ids, return_inverse=True)
            module.padding_idx = None  # it refers to the whole vocabulary
            module.weight = nn.Parameter(self._rows(table, wanted), requires_grad=False)
            compacted: Tensor = positions
            return compacted

        yield compact
        _release(base)

    @contextmanager
    def head(self, module: nn.Module) -> Iterator[None]:
        """`module`, the LM head, with its weights loaded: the embedding's if the checkpoint has none for it.

        As in `transformers`, stored weights are never tied, even if config.json says so.
        """
        row = next(row for row in self.family.model if isinstance(row, Embedding) and row.target == "lm_head.weight")
        name = row.source if self.has(row.source) or row.tied is None else row.tied
        state = {"weight": self._tensor(name)}
        if getattr(module, "bias", None) is not None:
            state["bias"] = self._tensor(f"{row.source.removesuffix('.weight')}.bias")
        module.load_state_dict(state, assign=True)
        yield
        _release(module)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self._checkpoint.tensors

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def _layer_tensor(self, name: str, prefix: str) -> Tensor:
        module, _, leaf = name.rpartition(".")
        if module.endswith("experts") and leaf in ("gate_up_proj", "down_proj"):
            row = self._experts["mlp.fc" if leaf == "gate_up_proj" else "mlp.proj"]
            return self._stacked(row, prefix)
        return self._tensor(prefix + self.family.modules_renamed.get(module, module) + "." + leaf)

    def _stacked(self, row: Experts, prefix: str) -> Tensor:
        """(experts, out, in): gate before up, the reverse of TensorRT-LLM's order. Already stacked experts are
        unchanged."""
        parts = list(dict.fromkeys(part.module for part in reversed(row.parts)))
        found: list[Tensor] = []
        while self.has(f"{prefix}{parts[0].format(len(found))}.weight"):
            found.append(torch.cat([self._tensor(f"{prefix}{part.format(len(found))}.weight") for part in parts]))
        return torch.stack(found)

    def _tensor(self, name: str) -> Tensor:
        return self._exact(name, self.dtype)

    def _exact(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._usable(self._as_stored(name), self._checkpoint.tensors[name], dtype)

    def _as_stored(self, name: str) -> Tensor:
        if name not in self._checkpoint.tensors:
            raise ForgeError(f"{self.directory} lacks {name}", hint="Fetch the checkpoint again.")
        return read_tensor(self._reader, self._checkpoint.tensors[name])

    def _rows(self, name: str, rows: Tensor) -> Tensor:
        """Rows of a matrix, in increasing order; rows close to each other are read at once."""
        stored = self._checkpoint.tensors[name]
        near = 1 + _GAP // stored.spec.row_bytes
        parts = []
        for span in rows.tensor_split((rows.diff() > near).nonzero().flatten() + 1):
            first, last = int(span[0]), int(span[-1])
            data = bytearray(stored.spec.row_bytes * (last + 1 - first))
            self._reader.read(stored, first, last + 1, memoryview(data))
            parts.append(
                torch.frombuffer(data, dtype=TORCH[stored.spec.dtype.name]).view(last + 1 - first, -1)[span - first]
            )
        return self._usable(torch.cat(parts), stored)

    def _usable(self, tensor: Tensor, stored: StoredTensor, dtype: torch.dtype | None = None) -> Tensor:
        if not all_finite(tensor):
            raise ForgeError(
                f"{stored.file}: {stored.spec.name} holds NaN or infinity", hint="Use an undamaged checkpoint."
            )
        return tensor.to(self.device, dtype or self.dtype)


def _release(module: nn.Module) -> None:
    """Free the weights; buffers are kept, because they are computed or small."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
