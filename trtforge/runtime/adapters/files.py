"""The matrices in an adapter's file, as PEFT saves them: A (rank, inputs) and B (outputs, rank) of each layer."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.core.features import LoraModule
from trtforge.formats.adapter import ADAPTER_CONFIG, adapter_scale, weights_file
from trtforge.formats.adapter_pairs import OTHER_ADAPTER, adapter_pairs
from trtforge.formats.shards import RowReader
from trtforge.models.torch_tensors import all_finite, read_tensor
from trtforge.runtime.adapters.parts import Part


class AdapterFile:
    """An adapter on disk; reads one module at a time."""

    def __init__(
        self,
        directory: Path,
        shapes: Mapping[LoraModule, tuple[int, int]],
        layers: int,
        rank: int,
        *,
        scaled: bool = False,
    ) -> None:
        """`shapes`: (outputs, inputs) of each module; `rank`: the largest one; `scaled`: B already includes the scale.

        Raises ForgeError if the adapter does not fit the model.
        """
        self._path = weights_file(directory)
        self._pairs = adapter_pairs(self._path)
        for (layer, module), pair in self._pairs.items():
            if module not in shapes:
                raise ForgeError(
                    f"{self._path}: {module} of layer {layer} has matrices, but is not a target module in "
                    f"{ADAPTER_CONFIG}",
                    hint=OTHER_ADAPTER,
                )
            out, inputs = shapes[module]
            fits = pair.a.spec.shape == (pair.rank, inputs) and pair.b.spec.shape == (out, pair.rank)
            if layer >= layers or not fits or not 0 < pair.rank <= rank:
                raise ForgeError(
                    f"{self._path}: {module} of layer {layer} has A {pair.a.spec.shape} and B {pair.b.spec.shape}, "
                    f"the model has {layers} layers with {out} outputs, {inputs} inputs and ranks up to {rank}",
                    hint=OTHER_ADAPTER,
                )
        ranks = {pair.rank for pair in self._pairs.values()}
        self._scales = {each: 1.0 if scaled else adapter_scale(directory, each) for each in ranks}

    def read(self, layer: int, part: Part, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """A (rank, inputs) and B (rank, outputs), scaled, of this rank; None if the adapter leaves the module alone.

        Raises ForgeError for numbers that are not finite in `dtype`: the other requests of a batch would get them too.
        """
        pair = self._pairs.get((layer, part.module))
        if pair is None:
            return None
        with RowReader() as reader:
            a, b = read_tensor(reader, pair.a).float(), read_tensor(reader, pair.b).float()
        a, b = a.to(dtype), (b * self._scales[pair.rank]).to(dtype)
        if not (all_finite(a) and all_finite(b)):
            raise ForgeError(
                f"{self._path}: {part.module} of layer {layer} has numbers that are not finite in "
                f"{str(dtype).removeprefix('torch.')}",
                hint=OTHER_ADAPTER,
            )
        return a[:, slice(*part.columns)], torch.cat([b[start:stop] for start, stop in part.rows]).t()
