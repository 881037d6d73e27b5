"""Medusa heads in a file of their own, as Hugging Face models have them. No weight is read.

Names and shapes are those that `load_medusa_hf` of TensorRT-LLM reads (tensorrt_llm/models/medusa/weight.py): for each
head its residual layers, `H.L.linear.weight` and `.bias`, then its LM head, `H.L.weight` with the next number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.formats.shards import StoredTensor, read_header

MEDUSA_FILE = "medusa_lm_head.safetensors"
MEDUSA_DIRECTORY = "medusa"
"""Where an engine keeps its heads."""

_HINT = "Give the directory of the heads that were trained for this model, with safetensors."


@dataclass(frozen=True)
class MedusaHeads:
    """`heads` of `layers` residual layers each. `tensors`: by name."""

    heads: int
    layers: int
    tensors: Mapping[str, StoredTensor]

    def numbers(self, heads: int) -> int:
        """The numbers in the first `heads` heads, or in all if there are fewer."""
        kept = {str(head) for head in range(heads)}
        return sum(prod(each.spec.shape) for name, each in self.tensors.items() if name.split(".")[0] in kept)


def read_medusa(directory: Path, hidden: int, vocab: int) -> MedusaHeads:
    """The heads for a model of these sizes. Raises ForgeError naming the file and the tensor that is wrong."""
    path = directory / MEDUSA_FILE
    if not path.is_file():
        raise ForgeError(f"engine.features.medusa.model: {directory} has no {MEDUSA_FILE}", hint=_HINT)
    tensors = {stored.spec.name: stored for stored in read_header(path)}
    layers = 0
    while f"0.{layers}.linear.weight" in tensors:
        layers += 1
    heads = 0
    expected: dict[str, tuple[int, ...]] = {}
    while f"{heads}.{layers}.weight" in tensors:
        for layer in range(layers):
            expected |= {f"{heads}.{layer}.linear.weight": (hidden, hidden), f"{heads}.{layer}.linear.bias": (hidden,)}
        expected[f"{heads}.{layers}.weight"] = (vocab, hidden)
        heads += 1
    if not heads:
        raise ForgeError(f"{path}: no Medusa heads", hint=_HINT)
    for name, shape in expected.items():
        found = tensors[name].spec.shape if name in tensors else "nothing"
        if found != shape:
            raise ForgeError(f"{path}: {name} is {found}, the model needs {shape}", hint=_HINT)
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise ForgeError(f"{path}: {unknown[0]} belongs to none of the {heads} heads", hint=_HINT)
    return MedusaHeads(heads, layers, tensors)
