"""Linear layers as checkpoints store them, by algorithm: which tensors, of which shapes.

Source: ModelOpt export/quant_utils.py; for stacks of experts export/layer_utils.py and tensorrt_llm/layers/moe.py.
"""

from dataclasses import replace

from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.models.kernels import PACKED_GROUPS
from trtforge.models.transforms import pack_int4
from trtforge.runtime.architecture.layout import LinearSlot
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.linears.linear import Stored
from trtforge.runtime.linears.weight_only import quantize_weight_only
from trtforge.runtime.linears.weights import Weights


def take_linear(spec: DecoderSpec, source: Weights, slot: LinearSlot) -> Stored:
    """One linear layer. Raises ForgeError for a tensor that is missing or of another shape."""
    stored = _take(spec, source, slot, ())
    return stored if not slot.bias else replace(stored, bias=source.take(f"{slot.module}.bias", slot.out))


def take_experts(spec: DecoderSpec, source: Weights, slot: LinearSlot) -> list[Stored]:
    """The experts of a stack. Raises ForgeError as `take_linear` does."""
    stack = _take(spec, source, slot, (slot.experts,))
    return [_expert(stack, index) for index in range(slot.experts)]


def _take(spec: DecoderSpec, source: Weights, slot: LinearSlot, lead: tuple[int, ...]) -> Stored:
    """The layer's tensors with leading dimensions `lead`; experts share one activation scale."""
    module, out, inputs = slot.module, slot.out, slot.inputs
    match spec.format_of(module):
        case "none":
            return Stored(source.take(f"{module}.weight", *lead, out, inputs))
        case "fp8":
            scale = f"{module}.weights_scaling_factor"
            return Stored(
                source.take(f"{module}.weight", *lead, out, inputs),
                weights_scale=source.take(scale, *lead, 1).float() if lead else source.take_scalar(scale),
                activation_scale=source.take_scalar(f"{module}.activation_scaling_factor"),
            )
        case "fp8_rowwise":
            return Stored(
                source.take(f"{module}.weight", *lead, out, inputs),
                weights_scale=source.take(f"{module}.per_channel_scale", *lead, out).float(),
            )
        case "nvfp4":
            return Stored(
                source.take(f"{module}.weight", *lead, out, inputs // 2),
                weights_scale=source.take(f"{module}.weights_scaling_factor", *lead, out, inputs // NVFP4_BLOCK),
                weights_scale_2=source.take_scalar(f"{module}.weights_scaling_factor_2"),
                activation_scale=source.take_scalar(f"{module}.activation_scaling_factor"),
            )
        case "int4_awq":
            prequant = f"{module}.prequant_scaling_factor"
            return Stored(
                source.take(f"{module}.weight", *lead, out // 2, inputs),
                weights_scale=source.take(f"{module}.weights_scaling_factor", *lead, out, inputs // spec.group_size),
                prequant=source.take(prequant, *lead, inputs) if source.has(prequant) else None,
            )
        case "w4a8_awq":
            return Stored(
                source.take(f"{module}.weight", *lead, out // 2, inputs),
                weights_scale=source.take(f"{module}.weights_scaling_factor", *lead, out, inputs // spec.group_size),
                weights_scale_2=source.take(f"{module}.weights_scaling_factor_2", *lead, 1).float(),
                activation_scale=source.take_scalar(f"{module}.activation_scaling_factor"),
                prequant=source.take(f"{module}.prequant_scaling_factor", *lead, inputs),
            )
        case "int8_sq":
            return Stored(
                source.take(f"{module}.weight", *lead, out, inputs),
                weights_scale=source.take(f"{module}.weights_scaling_factor", *lead, out).float(),
                activation_scale=source.take_scalar(f"{module}.activation_scaling_factor"),
                prequant=source.take(f"{module}.prequant_scaling_factor", *lead, inputs),
            )
        case "int8_wo":
            codes, scales = quantize_weight_only(source.take(f"{module}.weight", *lead, out, inputs), 8)
            return Stored(codes, weights_scale=scales.float())
        case "int4_wo":
            return _int4_weight_only(module, source.take(f"{module}.weight", *lead, out, inputs))


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
        weights_scale=own(stack.weights_scale),
        activation_scale=shared(stack.activation_scale),
        prequant=own(stack.prequant),
        weights_scale_2=own(second) if second is not None and second.dim() > 1 else shared(second),
    )
