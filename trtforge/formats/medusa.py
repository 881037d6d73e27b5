"""Medusa heads: in a separate file for Hugging Face models, and in TensorRT-LLM's checkpoints.

Names, shapes and the split over ranks are those of `load_medusa_hf` in tensorrt_llm/models/medusa/weight.py and of
`MedusaHead` in model.py beside it (1.2, b93e14ca): every layer is column-parallel, and the vocabulary is padded to a
multiple of tp. This module does not compute with weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from trtforge.core.dtypes import MODEL_DTYPES, dtype_named
from trtforge.core.errors import ForgeError
from trtforge.formats.shards import RowReader, StoredTensor, TensorSpec, Writer, read_header
from trtforge.formats.trtllm import MEDUSA_ARCHITECTURE, CheckpointConfig, rank_file

MEDUSA_FILE = "medusa_lm_head.safetensors"
MEDUSA_DIRECTORY = "medusa"
"""The directory of an engine's heads."""
MEDUSA_MODULES = "*medusa_heads*"
"""Matches the heads' linear layers in `exclude_modules`, by their names and by those of their weights."""

_PICKLED = "medusa_lm_head.pt"
_HINT = "Give the directory of the heads that were trained for this model, with safetensors."
_MOST_HEADS = 256
_PIECE = 8 << 20


@dataclass(frozen=True)
class MedusaHeads:
    """`heads` of `layers` residual layers each. `tensors`: by name."""

    heads: int
    layers: int
    tensors: Mapping[str, StoredTensor]

    def numbers(self, heads: int) -> int:
        """The number of parameters in the first `heads` heads, or in all if there are fewer."""
        kept = {str(head) for head in range(heads)}
        return sum(prod(each.spec.shape) for name, each in self.tensors.items() if name.split(".")[0] in kept)


def head_shapes(heads: int, layers: int, hidden: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """The tensors of Hugging Face's file.

    For each head H: its residual layers `H.L.linear.weight` and `.bias`, then its LM head `H.L.weight` with the next L.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            shapes |= {f"{head}.{layer}.linear.weight": (hidden, hidden), f"{head}.{layer}.linear.bias": (hidden,)}
        shapes[f"{head}.{layers}.weight"] = (vocab, hidden)
    return shapes


def name_in_rank(name: str) -> str:
    """TensorRT-LLM's name of a tensor in Hugging Face's file: `medusa_heads.H.medusa_layers.L.linear.weight` and
    `.bias`, `medusa_heads.H.lm_head.weight`."""
    head, layer, rest = name.split(".", 2)
    return (
        f"medusa_heads.{head}.lm_head.weight"
        if rest == "weight"
        else f"medusa_heads.{head}.medusa_layers.{layer}.{rest}"
    )


def read_medusa(directory: Path, hidden: int, vocab: int) -> MedusaHeads:
    """The heads for a model of these sizes. Raises ForgeError naming the file and the tensor that is wrong."""
    path = directory / MEDUSA_FILE
    if not path.is_file():
        pickled = (directory / _PICKLED).is_file()
        raise ForgeError(
            f"{directory} has no {MEDUSA_FILE}",
            hint=f"{_PICKLED} is pickled, which runs code when loaded: save its tensors as safetensors."
            if pickled
            else _HINT,
        )
    tensors = {stored.spec.name: stored for stored in read_header(path)}
    layers, heads = 0, 0
    while f"0.{layers}.linear.weight" in tensors:
        layers += 1
    while f"{heads}.{layers}.weight" in tensors:
        heads += 1
    if not heads:
        raise ForgeError(f"{path}: no Medusa heads", hint=_HINT)
    expected = head_shapes(heads, layers, hidden, vocab)
    for name, shape in expected.items():
        found = tensors[name].spec.shape if name in tensors else "nothing"
        if found != shape:
            raise ForgeError(f"{path}: {name} is {found}, the model needs {shape}", hint=_HINT)
        if tensors[name].spec.dtype.name not in MODEL_DTYPES:
            raise ForgeError(
                f"{path}: {name} is {tensors[name].spec.dtype.name}, not one of {', '.join(MODEL_DTYPES)}", hint=_HINT
            )
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise ForgeError(f"{path}: {unknown[0]} is not a tensor of the {heads} heads", hint=_HINT)
    return MedusaHeads(heads, layers, tensors)


def heads_in(config: CheckpointConfig) -> tuple[int, int] | None:
    """The numbers of heads and of their residual layers; None without heads. Raises ForgeError for invalid values."""
    if config.architecture != MEDUSA_ARCHITECTURE:
        return None
    more = config.model_extra or {}
    found = []
    for key, default, least in (("num_medusa_heads", 4, 1), ("num_medusa_layers", 1, 0)):
        value = more.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST_HEADS:
            raise ForgeError(
                f"config.json: {key} is {value!r}, not a whole number from {least} to {_MOST_HEADS}",
                hint="Convert the model and its heads again.",
            )
        found.append(value)
    return found[0], found[1]


def rank_shapes(config: CheckpointConfig) -> dict[str, tuple[int, ...]]:
    """The heads' tensors in every rank file of a checkpoint, by TensorRT-LLM's names; none without heads."""
    found, tp = heads_in(config), config.parallel.tp
    if found is None:
        return {}
    shapes = head_shapes(*found, config.hidden_size, config.vocab_size)
    return {name_in_rank(name): (-(-shape[0] // tp), *shape[1:]) for name, shape in shapes.items()}


def gather_medusa(config: CheckpointConfig, checkpoint: Path, directory: Path) -> None:
    """Write the heads of a checkpoint to Hugging Face's file in `directory`.

    Concatenates the ranks' rows, without the padding of the vocabulary. Raises ForgeError for a tensor that is missing
    or of another shape or dtype.
    """
    sizes = heads_in(config)
    assert sizes is not None, "only of a checkpoint with heads"
    ranks = [
        {stored.spec.name: stored for stored in read_header(checkpoint / rank_file(rank))}
        for rank in range(config.parallel.tp)
    ]
    dtype, of_rank = dtype_named(config.dtype), rank_shapes(config)
    specs = [
        TensorSpec(name, dtype, shape)
        for name, shape in head_shapes(*sizes, config.hidden_size, config.vocab_size).items()
    ]
    writer = Writer(directory / MEDUSA_FILE, specs)
    try:
        with RowReader() as reader:
            for spec in specs:
                writer.begin(spec.name)
                left, name = spec.nbytes, name_in_rank(spec.name)
                for index, tensors in enumerate(ranks):
                    stored = tensors.get(name)
                    if stored is None or stored.spec != TensorSpec(name, dtype, of_rank[name]):
                        raise ForgeError(
                            f"{checkpoint / rank_file(index)}: {name} is not {config.dtype} {list(of_rank[name])}",
                            hint="Convert the model and its heads again, with unquantised heads.",
                        )
                    taken = min(left, stored.spec.nbytes)
                    for start in range(0, taken, _PIECE):
                        part = memoryview(bytearray(min(_PIECE, taken - start)))
                        writer.write(reader.read_bytes(stored, start, part))
                    left -= taken
        writer.finish()
    finally:
        writer.close()
