"""compressed-tensors' `quantization_config`: the FP8 and INT4 schemes that TensorRT-LLM's layers support."""

import re

from trtforge.formats.quantization_values import Values, static_fp8_kv_cache
from trtforge.formats.quantized_source import Packing, QuantizedSource


def compressed_tensors(values: Values) -> QuantizedSource:
    """The description of a compressed-tensors checkpoint. Raises ForgeError, with the reason, for other schemes."""
    for key in ("sparsity_config", "transform_config"):
        if values.get(key) and values.part(key).get("format") != "dense":  # its matrices are stored whole
            raise values.refusal(f"{key} is not empty: TensorRT-LLM's layers support neither sparsity nor transforms")
    groups = values.part("config_groups")
    if len(groups.values) != 1:
        raise groups.refusal(f"{len(groups.values)} groups: a TensorRT-LLM checkpoint has one format")
    group = groups.part(next(iter(groups.values)))
    form = str(group.get("format") or values.get("format"))
    match form:
        case "float-quantized" | "naive-quantized":
            packing, size = _fp8(group), 128
        case "pack-quantized":
            packing, size = "pack_quantized", _int4(group)
        case _:
            known = "float-quantized (FP8) and pack-quantized (INT4) are"
            raise values.refusal(f"compressed-tensors format {form} is not converted: {known}")
    if group.get("output_activations") is not None:
        raise group.refusal("output_activations are quantised: TensorRT-LLM's layers quantise inputs alone")
    targets = group.names("targets")
    return QuantizedSource(
        tool="compressed-tensors",
        packing=packing,
        never=tuple(_pattern(values, name) for name in values.names("ignore")),
        only=None if "Linear" in targets else tuple(_pattern(group, name) for name in targets),
        group_size=size,
        fp8_kv_cache=static_fp8_kv_cache(values),
    )


def _fp8(group: Values) -> Packing:
    if group.get("input_activations") is None:
        raise group.refusal("input_activations are not quantised: TensorRT-LLM's FP8 layers quantise them")
    weights, inputs = group.part("weights"), group.part("input_activations")
    for part in (weights, inputs):
        if (part.get("num_bits"), part.get("type")) != (8, "float"):
            raise part.refusal("8-bit floats are expected")
    granularity, tokens = (str(part.get("strategy") or "tensor") for part in (weights, inputs))
    dynamic = bool(inputs.get("dynamic"))
    match granularity, dynamic, tokens:
        case "tensor", False, "tensor":
            return "fp8"
        case "channel", True, "token":
            return "fp8_rows"
        case "tensor", True, "token":
            return "fp8_one_scale"
        case (("block" | "group"), _, _):
            raise weights.refusal(f"{granularity} scales: TensorRT-LLM engines have no block-scaled FP8 layers")
        case _, True, "tensor":
            raise inputs.refusal(
                "dynamic per-tensor activation scales: TensorRT-LLM's FP8 needs a static activation scale, "
                "its FP8_PER_CHANNEL_PER_TOKEN dynamic per-token scales"
            )
        case _:
            said = f"{granularity} weight and {'dynamic' if dynamic else 'static'} {tokens} activation scales"
            raise group.refusal(
                f"{said}: supported are tensor with static tensor, and channel or tensor with dynamic token scales"
            )


def _int4(group: Values) -> int:
    weights = group.part("weights")
    if (weights.get("num_bits"), weights.get("type")) != (4, "int"):
        raise weights.refusal("4-bit integer weights are expected")
    if group.get("input_activations") is not None:
        raise group.refusal("input_activations are quantised: TensorRT-LLM's W4A16_AWQ keeps them in the model's dtype")
    if weights.get("symmetric") is False:
        raise weights.refusal("symmetric is false: TensorRT-LLM's W4A16_AWQ is written without zero points")
    if weights.get("actorder") not in (None, False, "static", "weight"):
        raise weights.refusal(
            "actorder permutes the inputs: TensorRT-LLM's groups are consecutive inputs",
            "Quantise with actorder static, or convert the original checkpoint.",
        )
    if weights.get("strategy") == "channel":
        raise weights.refusal("strategy is channel: TensorRT-LLM's W4A16_AWQ has groups of 64 or 128 inputs")
    return weights.group_size("group_size")


def _pattern(values: Values, name: str) -> str:
    """A `re:` expression, matched from the start, or a module's exact name."""
    return values.regex(name[3:]) if name.startswith("re:") else f"^{re.escape(name)}$"
