"""Reads linear layers as checkpoints store them: names, shapes and dtypes of the tensors by algorithm.

Source: ModelOpt export/quant_utils.py; for stacks of experts export/layer_utils.py and tensorrt_llm/layers/moe.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.core.recipe import QuantFormat
from trtforge.models.kernels import PACKED_GROUPS
from trtforge.models.transforms import pack_int4
from trtforge.runtime.architecture.layout import LinearSlot
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.linears.linear import Stored
from trtforge.runtime.linears.weight_only import quantize_weight_only
from trtforge.runtime.linears.weights import Weights

_E4M3 = (torch.float8_e4m3fn,)
_CODES = (torch.int8, torch.uint8)
"""ModelOpt's and TensorRT-LLM's types of packed 4-bit codes differ in the sign only."""
_WEIGHTS: Mapping[str, tuple[torch.dtype, ...]] = {
    "fp8": _E4M3,
    "fp8_rowwise": _E4M3,
    "nvfp4": _CODES,
    "int4_awq": _CODES,
    "w4a8_awq": _CODES,
    "int8_sq": (torch.int8,),
}
"""The dtypes of quantised weights; weight-only formats store unquantised ones."""


def take_linear(spec: DecoderSpec, source: Weights, slot: LinearSlot) -> Stored:
    """One linear layer. Raises ForgeError for a tensor that is missing or of another shape."""
    stored = _take(spec, source, slot, ())
    return stored if not slot.bias else replace(stored, bias=source.take_floating(f"{slot.module}.bias", slot.out))


def take_experts(spec: DecoderSpec, source: Weights, slot: LinearSlot) -> list[Stored]:
    """The experts of a stack. Raises ForgeError as `take_linear` does."""
    stack = _take(spec, source, slot, (slot.experts,))
    if slot.bias:
        stack = replace(stack, bias=source.take_floating(f"{slot.module}.bias", slot.experts, slot.out))
    return [_expert(stack, index) for index in range(slot.experts)]


@dataclass(frozen=True)
class _Tensors:
    """The tensors of one layer, with leading dimensions `lead`."""

    source: Weights
    module: str
    algorithm: QuantFormat
    lead: tuple[int, ...]

    def weight(self, *shape: int) -> Tensor:
        name, dtypes = f"{self.module}.weight", _WEIGHTS.get(self.algorithm)
        if dtypes is None:
            return self.source.take_floating(name, *self.lead, *shape)
        return self.source.take_as(name, dtypes, *self.lead, *shape)

    def scales(self, name: str, *shape: int) -> Tensor:
        return self.source.take_floating(f"{self.module}.{name}", *self.lead, *shape)

    def block_scales(self, *shape: int) -> Tensor:
        return self.source.take_as(f"{self.module}.weights_scaling_factor", _E4M3, *self.lead, *shape)

    def scalar(self, name: str) -> Tensor:
        return self.source.take_scalar(f"{self.module}.{name}")

    def has(self, name: str) -> bool:
        return self.source.has(f"{self.module}.{name}")


def _take(spec: DecoderSpec, source: Weights, slot: LinearSlot, lead: tuple[int, ...]) -> Stored:
    """The layer's tensors with leading dimensions `lead`; experts share one activation scale."""
    module, out, inputs = slot.module, slot.out, slot.inputs
    of = _Tensors(source, module, spec.format_of(module), lead)
    match of.algorithm:
        case "none":
            return Stored(of.weight(out, inputs))
        case "fp8":
            scale = "weights_scaling_factor"
            return Stored(
                of.weight(out, inputs),
                weights_scale=of.scales(scale, 1).float() if lead else of.scalar(scale),
                activation_scale=of.scalar("activation_scaling_factor"),
            )
        case "fp8_rowwise":
            return Stored(
                of.weight(out, inputs),
                weights_scale=of.scales("per_channel_scale", out).float(),
            )
        case "nvfp4":
            scale = "weights_scaling_factor_2"
            return Stored(
                of.weight(out, inputs // 2),
                weights_scale=of.block_scales(out, inputs // NVFP4_BLOCK),
                weights_scale_2=of.scales(scale, 1).float() if lead else of.scalar(scale),
                activation_scale=of.scalar("activation_scaling_factor"),
            )
        case "int4_awq":
            prequant = "prequant_scaling_factor"
            return Stored(
                of.weight(out // 2, inputs),
                weights_scale=of.scales("weights_scaling_factor", out, inputs // spec.group_size),
                prequant=of.scales(prequant, inputs) if of.has(prequant) else None,
            )
        case "w4a8_awq":
            return Stored(
                of.weight(out // 2, inputs),
                weights_scale=of.scales("weights_scaling_factor", out, inputs // spec.group_size),
                weights_scale_2=of.scales("weights_scaling_factor_2", 1).float(),
                activation_scale=of.scalar("activation_scaling_factor"),
                prequant=of.scales("prequant_scaling_factor", inputs),
            )
        case "int8_sq":
            return Stored(
                of.weight(out, inputs),
                weights_scale=of.scales("weights_scaling_factor", out).float(),
                activation_scale=of.scalar("activation_scaling_factor"),
                prequant=of.scales("prequant_scaling_factor", inputs),
            )
        case "int8_wo":
            codes, scales = quantize_weight_only(of.weight(out, inputs), 8)
            return Stored(codes, weights_scale=scales.float())
        case "int4_wo":
            return _int4_weight_only(module, of.weight(out, inputs))


def _int4_weight_only(module: str, weight: Tensor) -> Stored:
    """Weight-only INT4 as W4A16_AWQ stores it: a row's scale is repeated for each group, of a size kernels support."""
    out, inputs = weight.shape[-2:]
    if out % 2:
        raise ForgeError(
            f"{module} has {out} outputs on a rank, 4-bit weights need an even number",
            hint="Convert to fewer tensor-parallel ranks, or with another format.",
        )
    codes, scales = quantize_weight_only(weight, 4)
    packed = pack_int4(codes.flatten(0, -2)).view(*weight.shape[:-2], out // 2, inputs)
    group = next((size for size in PACKED_GROUPS if inputs % size == 0), inputs)
    return Stored(packed, weights_scale=scales.float().unsqueeze(-1).repeat_interleave(inputs // group, dim=-1))


def _expert(stack: Stored, index: int) -> Stored:
    def own(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[index]

    def shared(tensor: Tensor | None) -> Tensor | None:
        """A copy for each expert: safetensors refuses tensors that share memory."""
        return None if tensor is None else tensor.clone()

    second = stack.weights_scale_2
    return replace(
        stack,
        weight=stack.weight[index],
        bias=own(stack.bias),
        weights_scale=own(stack.weights_scale),
        activation_scale=shared(stack.activation_scale),
        prequant=own(stack.prequant),
        weights_scale_2=own(second) if second is not None and second.dim() > 1 else shared(second),
    )
