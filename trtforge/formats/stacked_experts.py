"""Reads experts stacked in one three-dimensional tensor as one matrix per expert.

Llama 4 and GPT-OSS: `experts.gate_up_proj` (experts, in, 2 x inner) and `experts.down_proj` (experts, inner, out). The
modules of transformers 5 also stack the experts of other families, which are published individually:
`experts.gate_up_proj` (experts, 2 x inner, in), gate before up, and `experts.down_proj` (experts, out, inner). Sources:
Llama4TextExperts, GptOssExperts and MixtralExperts in transformers/models (5.23).
"""

from collections.abc import Mapping

from trtforge.core.errors import ForgeError
from trtforge.core.plausible import MOST_EXPERTS
from trtforge.formats.shards import Slice, StoredTensor, TensorSpec

_PUBLISHED_SO = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "GptOssForCausalLM")
_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_ONE_BY_ONE = {
    "MixtralForCausalLM": ("w1", "w3", "w2"),
    "Qwen2MoeForCausalLM": _GATE_UP_DOWN,
    "Qwen3MoeForCausalLM": _GATE_UP_DOWN,
    "Qwen3NextForCausalLM": _GATE_UP_DOWN,
    "DeepseekV2ForCausalLM": _GATE_UP_DOWN,
    "DeepseekV3ForCausalLM": _GATE_UP_DOWN,
    "Glm4MoeForCausalLM": _GATE_UP_DOWN,
}
"""By architecture: the names of an expert's gate, up and down projection."""
_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"


def by_expert(tensors: Mapping[str, StoredTensor], architecture: str) -> dict[str, StoredTensor]:
    """The tensors, with each stack replaced by its slices, named like linear layers of the experts.

    Raises ForgeError for implausibly many experts (an empty tensor can claim any number), and for other tensors with a
    slice's name.
    """
    if architecture not in (*_PUBLISHED_SO, *_ONE_BY_ONE):
        return dict(tensors)
    stacks = [t for name, t in tensors.items() if name.endswith((_GATE_UP, _DOWN)) and len(t.spec.shape) == 3]
    if sum(stack.spec.shape[0] for stack in stacks) > 2 * MOST_EXPERTS:
        largest = max(stacks, key=lambda stack: stack.spec.shape[0])
        raise ForgeError(
            f"{largest.file}: {largest.spec.name} has {largest.spec.shape[0]:,} experts: the limit is {MOST_EXPERTS:,} "
            "in all layers",
            hint="Fetch the checkpoint again.",
        )
    names = _ONE_BY_ONE.get(architecture)
    slices = {piece.spec.name: piece for stack in stacks for piece in _slices(stack, names)}
    both = sorted(slices.keys() & tensors.keys())
    if both:
        raise ForgeError(
            f"{tensors[both[0]].file}: {both[0]} is in {slices[both[0]].whole.spec.name} too",
            hint="Fetch the checkpoint again.",
        )
    stacked = {stack.spec.name for stack in stacks}
    return {name: tensor for name, tensor in tensors.items() if name not in stacked} | slices


def stacked_by_transformers(name: str, architecture: str) -> bool:
    """Whether a tensor is a stack of experts that are published individually."""
    return architecture in _ONE_BY_ONE and name.endswith((_GATE_UP, _DOWN))


def _slices(whole: StoredTensor, names: tuple[str, str, str] | None) -> list[Slice]:
    """The matrices of all experts: named like their stack, or as gate, up and down projection."""
    experts, rows, columns = whole.spec.shape
    prefix, _, leaf = whole.spec.name.rpartition(".")
    size = whole.spec.nbytes // max(1, experts)
    leaves: tuple[str, ...] = (leaf,)
    if names is not None:
        leaves = names[:2] if leaf == "gate_up_proj" else names[2:]
    count = len(leaves)
    return [
        Slice(
            TensorSpec(f"{prefix}.{expert}.{name}.weight", whole.spec.dtype, (rows // count, columns)),
            whole.file,
            whole.offset + expert * size + part * size // count,
            whole,
        )
        for expert in range(experts)
        for part, name in enumerate(leaves)
    ]
