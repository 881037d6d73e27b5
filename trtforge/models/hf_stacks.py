"""Stacks experts' tensors in the export plan for models whose Hugging Face checkpoint has them in one tensor.

ModelOpt names the scaling factors of the stack `gate_up_proj` `gate_up_proj_weight_scale` and so on, uses (experts, in,
out) also for packed weights and block scales, and has one tensor scale for all experts (export/unified_export_hf.py and
export/quant_utils.py, `maybe_transpose_expert_weight_dimensions`, 0.47). TensorRT-LLM reads this layout
(_torch/modules/fused_moe/quantization.py, `FUSED_GATE_UP_PROJ`, 1.2).
"""

import re
from dataclasses import replace

from trtforge.formats.shards import TensorSpec
from trtforge.models.family import Family
from trtforge.models.hf_tensors import Blocks, HfPlan, HfTensor, Stack


def stacked(plan: HfPlan, family: Family) -> HfPlan:
    """The plan with the tensors of stacked experts joined; unchanged for other families."""
    leaves = {part.module.rpartition(".")[2] for row in family.experts if row.stacked for part in row.parts}
    if not leaves:
        return plan
    of_expert = re.compile(rf"(.+\.experts)\.[0-9]+\.({'|'.join(sorted(leaves))})(?:\.(.+))?")
    tensors: list[HfTensor] = []
    groups: dict[str, list[HfTensor]] = {}
    for tensor in plan.tensors:
        match = of_expert.fullmatch(tensor.spec.name)
        if match is None:
            tensors.append(tensor)
            continue
        prefix, leaf, part = match.groups()
        name = f"{prefix}.{leaf}" + ("" if part == "weight" else f"_{part}")
        groups.setdefault(name, []).append(tensor)
    tensors += [_joined(name, experts) for name, experts in groups.items()]
    unquantized = tuple(name for name in plan.unquantized if not of_expert.fullmatch(name))
    return replace(plan, tensors=tuple(tensors), unquantized=unquantized)


def _joined(name: str, experts: list[HfTensor]) -> HfTensor:
    """The matrices (in, out) concatenated; the experts' common scale once."""
    first = experts[0]
    if not isinstance(first.content, Blocks):
        return replace(first, spec=replace(first.spec, name=name))
    parts = tuple(_transposed(tensor) for tensor in experts)
    return HfTensor(TensorSpec(name, first.spec.dtype, (len(parts), *parts[0].spec.shape)), Stack(parts))


def _transposed(tensor: HfTensor) -> HfTensor:
    """The tensor as (in, out); unquantised tensors already are."""
    assert isinstance(tensor.content, Blocks)
    if tensor.content.transposed:
        return tensor
    spec = replace(tensor.spec, shape=tensor.spec.shape[::-1])
    return HfTensor(spec, replace(tensor.content, transposed=True))
