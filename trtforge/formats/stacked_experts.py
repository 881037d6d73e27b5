"""Experts stacked in one tensor of three dimensions, read as one matrix for each expert.

Llama 4: `experts.gate_up_proj` (experts, in, 2 x inner) and `experts.down_proj` (experts, inner, out).
Source: transformers/models/llama4/modeling_llama4.py, Llama4TextExperts.
"""

from collections.abc import Mapping

from trtforge.formats.shards import Slice, StoredTensor, TensorSpec

_STACKED = {
    "Llama4ForCausalLM": ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    "Llama4ForConditionalGeneration": ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
}
"""By architecture: how the names of such tensors end."""


def by_expert(tensors: Mapping[str, StoredTensor], architecture: str) -> dict[str, StoredTensor]:
    """The tensors, with each stack as its slices, named like a linear layer of the expert."""
    endings = _STACKED.get(architecture, ())
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if endings and name.endswith(endings) and len(tensor.spec.shape) == 3:
            found |= {piece.spec.name: piece for piece in _slices(tensor)}
        else:
            found[name] = tensor
    return found


def _slices(whole: StoredTensor) -> list[Slice]:
    experts, *shape = whole.spec.shape
    prefix, _, leaf = whole.spec.name.rpartition(".")
    size = whole.spec.nbytes // max(1, experts)
    names = [f"{prefix}.{expert}.{leaf}.weight" for expert in range(experts)]
    return [
        Slice(TensorSpec(name, whole.spec.dtype, tuple(shape)), whole.file, whole.offset + index * size, whole)
        for index, name in enumerate(names)
    ]
