"""Experts stacked in one tensor of three dimensions, read as one matrix for each expert.

Llama 4 and GPT-OSS: `experts.gate_up_proj` (experts, in, 2 x inner) and `experts.down_proj` (experts, inner, out).
Sources: Llama4TextExperts and GptOssExperts in transformers/models (modeling_llama4.py, modeling_gpt_oss.py).
"""

from collections.abc import Mapping

from trtforge.core.errors import ForgeError
from trtforge.core.plausible import MOST_EXPERTS
from trtforge.formats.shards import Slice, StoredTensor, TensorSpec

_STACKED = {
    "Llama4ForCausalLM": ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    "Llama4ForConditionalGeneration": ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    "GptOssForCausalLM": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
}
"""By architecture: how the names of such tensors end."""


def by_expert(tensors: Mapping[str, StoredTensor], architecture: str) -> dict[str, StoredTensor]:
    """The tensors, with each stack as its slices, named like a linear layer of the expert.

    Raises ForgeError for more experts than any model has (a tensor without elements can claim any number), and for
    tensors that have the names of slices.
    """
    endings = _STACKED.get(architecture, ("\0",))
    stacks = [t for name, t in tensors.items() if name.endswith(endings) and len(t.spec.shape) == 3]
    if sum(stack.spec.shape[0] for stack in stacks) > len(endings) * MOST_EXPERTS:
        largest = max(stacks, key=lambda stack: stack.spec.shape[0])
        raise ForgeError(
            f"{largest.file}: {largest.spec.name} has {largest.spec.shape[0]:,} experts: the limit is {MOST_EXPERTS:,} "
            "in all layers",
            hint="Fetch the checkpoint again.",
        )
    slices = {piece.spec.name: piece for stack in stacks for piece in _slices(stack)}
    both = sorted(slices.keys() & tensors.keys())
    if both:
        raise ForgeError(
            f"{tensors[both[0]].file}: {both[0]} is in {slices[both[0]].whole.spec.name} too",
            hint="Fetch the checkpoint again.",
        )
    stacked = {stack.spec.name for stack in stacks}
    return {name: tensor for name, tensor in tensors.items() if name not in stacked} | slices


def _slices(whole: StoredTensor) -> list[Slice]:
    experts, *shape = whole.spec.shape
    prefix, _, leaf = whole.spec.name.rpartition(".")
    size = whole.spec.nbytes // max(1, experts)
    names = [f"{prefix}.{expert}.{leaf}.weight" for expert in range(experts)]
    return [
        Slice(TensorSpec(name, whole.spec.dtype, tuple(shape)), whole.file, whole.offset + index * size, whole)
        for index, name in enumerate(names)
    ]
