"""The matrices in an adapter's file, as PEFT saves them: A (rank, inputs) and B (outputs, rank) of each layer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.core.features import LoraModule
from trtforge.formats.adapter import ADAPTER_CONFIG, PEFT_MODULES, adapter_scale, weights_file
from trtforge.formats.shards import RowReader, StoredTensor, read_header
from trtforge.models.torch_tensors import all_finite, read_tensor
from trtforge.runtime.adapters.parts import Part

_KEY = re.compile(
    r"(?:(?:base_model|model|language_model|transformer|decoder)\.)*"
    r"(?:layers|h)\.(\d{1,9})\.(?:self_attn|attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight"
)
"""Matches the language model's layers; a model's vision tower has layers of the same names."""
_HINT = "Give an adapter of this model, as PEFT saves it."


@dataclass(frozen=True)
class Pair:
    """The matrices of one module in one layer."""

    a: StoredTensor
    b: StoredTensor

    @property
    def rank(self) -> int:
        """LoRA rank."""
        return self.a.spec.shape[0]


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
        self._pairs = _pairs(self._path)
        for (layer, module), pair in self._pairs.items():
            if module not in shapes:
                raise ForgeError(
                    f"{self._path}: {module} of layer {layer} has matrices, but is not a target module in "
                    f"{ADAPTER_CONFIG}",
                    hint=_HINT,
                )
            out, inputs = shapes[module]
            fits = pair.a.spec.shape == (pair.rank, inputs) and pair.b.spec.shape == (out, pair.rank)
            if layer >= layers or not fits or not 0 < pair.rank <= rank:
                raise ForgeError(
                    f"{self._path}: {module} of layer {layer} has A {pair.a.spec.shape} and B {pair.b.spec.shape}, "
                    f"the model has {layers} layers with {out} outputs, {inputs} inputs and ranks up to {rank}",
                    hint=_HINT,
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
                hint=_HINT,
            )
        return a[:, slice(*part.columns)], torch.cat([b[start:stop] for start, stop in part.rows]).t()


def _pairs(path: Path) -> dict[tuple[int, LoraModule], Pair]:
    halves: dict[tuple[int, LoraModule], dict[str, StoredTensor]] = {}
    for stored in read_header(path):
        found = _KEY.fullmatch(stored.spec.name)
        module = PEFT_MODULES.get(found[2]) if found is not None else None
        if found is None or module is None or len(stored.spec.shape) != 2:
            raise ForgeError(
                f"{path}: {stored.spec.name} is not a LoRA matrix of a decoder layer",
                hint="Merge it into the model (`merge_and_unload` of PEFT) and build that, or leave such layers out.",
            )
        half = halves.setdefault((int(found[1]), module), {})
        if found[3] in half:
            raise ForgeError(f"{path}: lora_{found[3]} of {module} of layer {found[1]} occurs twice", hint=_HINT)
        half[found[3]] = stored
    if not halves:
        raise ForgeError(f"{path}: no LoRA matrices", hint=_HINT)
    for (layer, module), half in halves.items():
        if len(half) != 2:
            raise ForgeError(f"{path}: {module} of layer {layer} has only lora_{next(iter(half))}", hint=_HINT)
    return {key: Pair(half["A"], half["B"]) for key, half in halves.items()}
