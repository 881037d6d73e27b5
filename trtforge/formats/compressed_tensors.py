"""compressed-tensors' `quantization_config`: the schemes that TensorRT-LLM's layers support.

A module's group is found as in `match_targets` in compressed_tensors/utils/match.py (0.20): exact names take precedence
over expressions, and expressions over module classes; of several expressions, the first in alphabetical order counts.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.formats.mixed_source import mixed_source
from trtforge.formats.quantization_values import Values, static_fp8_kv_cache
from trtforge.formats.quantized_source import Packing, QuantizedSource

COMPRESSED_TENSORS = "compressed-tensors"
_EVERY_LINEAR = "Linear"
_EXPRESSION = "re:"
_NVFP4_NAMES = {
    "weight": "weight_packed",
    "tensor_scale": "weight_global_scale",
    "input_scale": "input_global_scale",
    "divisors": True,
}


@dataclass(frozen=True)
class _Scheme:
    """The properties of all modules of a group."""

    packing: Packing
    group_size: int = 128
    scale_per_output: bool = False

    @property
    def names(self) -> Mapping[str, Any]:
        """The names of its tensors that differ from other tools' names."""
        return _NVFP4_NAMES if self.packing == "nvfp4" else {}


def compressed_tensors(values: Values) -> QuantizedSource:
    """The description of a compressed-tensors checkpoint. Raises ForgeError, with the reason, for other schemes."""
    for key in ("sparsity_config", "transform_config"):
        if values.get(key) and values.part(key).get("format") != "dense":  # its matrices are stored dense
            raise values.refusal(f"{key} is not empty: TensorRT-LLM's layers support neither sparsity nor transforms")
    groups = values.part("config_groups")
    targets: dict[_Scheme, list[str]] = {}
    for name in groups.values:
        group = groups.part(name)
        targets.setdefault(_scheme(values, group), []).extend(group.names("targets"))
    for target, count in Counter(name for names in targets.values() for name in set(names)).items():
        if count > 1:
            raise groups.refusal(f"{count} different groups have the target {target}")
    left = tuple(_pattern(values, name) for name in values.names("ignore"))
    patterns = _own_patterns(groups, targets)
    cache = static_fp8_kv_cache(values)
    found = []
    for scheme, own in patterns.items():
        others = tuple(each for other, names in patterns.items() if other != scheme for each in names)
        everywhere_else = _EVERY_LINEAR in targets[scheme]
        found.append(
            QuantizedSource(
                tool=COMPRESSED_TENSORS,
                packing=scheme.packing,
                never=(*left, *others) if everywhere_else else left,
                only=None if everywhere_else else own,
                group_size=scheme.group_size,
                scale_per_output=scheme.scale_per_output,
                fp8_kv_cache=cache,
                **scheme.names,
            )
        )
    return mixed_source(groups, found)


def _own_patterns(values: Values, targets: Mapping[_Scheme, Sequence[str]]) -> Mapping[_Scheme, tuple[str, ...]]:
    """The patterns of each scheme's targets, without modules that match an earlier target of another scheme."""
    owners = {target: scheme for scheme, names in targets.items() for target in names}
    earlier: list[tuple[str, str]] = []  # targets and their patterns
    found: dict[_Scheme, tuple[str, ...]] = dict.fromkeys(targets, ())
    for target in sorted(owners, key=lambda target: (target.startswith(_EXPRESSION), target)):
        scheme, pattern = owners[target], _pattern(values, target)
        if target.startswith(_EXPRESSION):
            others = [(name, own) for name, own in earlier if owners[name] != scheme]
            taken = [own for name, own in others if name.startswith(_EXPRESSION) or re.match(pattern, name)]
            pattern = "".join(f"(?!{own})" for own in taken) + pattern
        earlier.append((target, pattern))
        found[scheme] += (pattern,)
    return found


def _scheme(values: Values, group: Values) -> _Scheme:
    """How a group's modules are stored. Raises ForgeError for schemes without a counterpart."""
    form = str(group.get("format") or values.get("format"))
    if group.get("output_activations") is not None:
        raise group.refusal("output_activations are quantised: TensorRT-LLM's layers quantise inputs alone")
    match form:
        case "int-quantized":
            return _int8(group)
        case "naive-quantized" if group.part("weights").get("type") == "int":
            return _int8(group)
        case "float-quantized" | "naive-quantized":
            return _Scheme(_fp8(group))
        case "pack-quantized":
            return _Scheme("pack_quantized", *_int4(group))
        case "nvfp4-pack-quantized":
            return _nvfp4(group)
        case _:
            known = "float-quantized (FP8), int-quantized, pack-quantized (INT4) and nvfp4-pack-quantized are"
            raise values.refusal(f"compressed-tensors format {form} is not converted: {known}")


def _int8(group: Values) -> _Scheme:
    if group.get("input_activations") is None:
        raise group.refusal(
            "input_activations are not quantised: TensorRT-LLM's build rounds INT8 weights itself, with other scales",
            "Convert the original checkpoint with --quant int8_wo.",
        )
    weights, inputs = group.part("weights"), group.part("input_activations")
    for part in (weights, inputs):
        if (part.get("num_bits"), part.get("type")) != (8, "int"):
            raise part.refusal("8-bit integers are expected")
        if part.get("symmetric") is False:
            raise part.refusal("symmetric is false: TensorRT-LLM's INT8 layers have no zero points")
    if weights.get("strategy") != "channel":
        raise weights.refusal(f"strategy is {weights.get('strategy')}: TensorRT-LLM's INT8 has a scale for each output")
    if inputs.get("dynamic") or (inputs.get("strategy") or "tensor") != "tensor":
        raise inputs.refusal(
            "activation scales by token: the INT8 layers of trtforge's checkpoints have a static one",
            "Quantise with static activation scales, use FP8 with a scale a token, or convert the original checkpoint "
            "with --quant int8_sq.",
        )
    return _Scheme("int8_rows")


def _nvfp4(group: Values) -> _Scheme:
    if group.get("input_activations") is None:
        raise group.refusal("input_activations are not quantised: TensorRT-LLM's FP4 layers quantise them")
    for part in (group.part("weights"), group.part("input_activations")):
        if (part.get("num_bits"), part.get("type")) != (4, "float"):
            raise part.refusal("4-bit floats are expected")
        part.require("group_size", part.get("group_size"), (NVFP4_BLOCK,), f"NVFP4 blocks are of {NVFP4_BLOCK} inputs")
    return _Scheme("nvfp4", NVFP4_BLOCK)


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


def _int4(group: Values) -> tuple[int, bool]:
    """The group size, and whether there is one scale per output."""
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
    size, per_output = weights.int4_groups("group_size")
    return size, per_output or weights.get("strategy") == "channel"


def _pattern(values: Values, name: str) -> str:
    """A `re:` expression, matched from the start, or a module's exact name."""
    is_expression = name.startswith(_EXPRESSION)
    return values.regex(name.removeprefix(_EXPRESSION)) if is_expression else f"^{re.escape(name)}$"
