"""The names of the matrices in an adapter's file, as PEFT saves them: A (rank, inputs) and B (outputs, rank)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.features import LoraModule
from trtforge.formats.adapter import MERGE_ADAPTER, adapter_scale, modules_of, weights_file
from trtforge.formats.shards import StoredTensor, read_header

_KEY = re.compile(
    r"(?:(?:base_model|model|language_model|transformer|decoder|gpt_neox)\.)*(?:layers|h)\.(\d{1,9})\."
    r"((?:self_attn|attn|self_attention|attention|mlp)\.\w+|fc[12])\.lora_([AB])(?:\.default)?\.weight"
)
"""Matches the language model's layers; a model's vision tower has layers of the same names. OPT's MLP has no prefix."""
OTHER_ADAPTER = "Give an adapter of this model, as PEFT saves it."


@dataclass(frozen=True)
class Pair:
    """The matrices of one module in one layer."""

    a: StoredTensor
    b: StoredTensor

    @property
    def rank(self) -> int:
        """LoRA rank."""
        return self.a.spec.shape[0]


def adapter_pairs(path: Path) -> Mapping[tuple[int, LoraModule], Pair]:
    """The matrices in an adapter's file by layer and module. Reads no weights.

    Raises ForgeError for other tensors, and for a module with one matrix alone.
    """
    halves: dict[tuple[int, LoraModule], dict[str, StoredTensor]] = {}
    for stored in read_header(path):
        found = _KEY.fullmatch(stored.spec.name)
        modules = modules_of(found[2]) if found is not None else ()
        if found is None or len(modules) != 1 or len(stored.spec.shape) != 2:
            raise ForgeError(
                f"{path}: {stored.spec.name} is not a LoRA matrix of a decoder layer",
                hint=MERGE_ADAPTER,
            )
        (module,) = modules
        half = halves.setdefault((int(found[1]), module), {})
        if found[3] in half:
            message = f"{path}: lora_{found[3]} of {module} of layer {found[1]} occurs twice"
            raise ForgeError(message, hint=OTHER_ADAPTER)
        half[found[3]] = stored
    if not halves:
        raise ForgeError(f"{path}: no LoRA matrices", hint=OTHER_ADAPTER)
    for (layer, module), half in halves.items():
        if len(half) != 2:
            raise ForgeError(f"{path}: {module} of layer {layer} has only lora_{next(iter(half))}", hint=OTHER_ADAPTER)
    return {key: Pair(half["A"], half["B"]) for key, half in halves.items()}


def require_scaled_pairs(directory: Path) -> None:
    """Raises ForgeError if an adapter's file has other tensors than pairs of A and B of the ranks in its configuration.

    For TensorRT-LLM's LLM API, which skips what it does not know.
    """
    path = weights_file(directory)
    pairs = adapter_pairs(path)
    for (layer, module), pair in pairs.items():
        if pair.b.spec.shape[1] != pair.rank:
            raise ForgeError(
                f"{path}: {module} of layer {layer} has A {pair.a.spec.shape} and B {pair.b.spec.shape}",
                hint=OTHER_ADAPTER,
            )
    for rank in {pair.rank for pair in pairs.values()}:
        adapter_scale(directory, rank)
