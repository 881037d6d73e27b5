"""Reads a Hugging Face checkpoint's quantisation from its JSON files; formats that cannot be stored exactly are errors.

Sources: AutoAWQ, GPTQModel and AutoFP8 in config.json's `quantization_config`; ModelOpt's `hf_quant_config.json`.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import read_json_object
from trtforge.formats.compressed_tensors import compressed_tensors
from trtforge.formats.hf import QUANTIZATION_FILES, HfConfig
from trtforge.formats.modelopt import modelopt
from trtforge.formats.quantization_values import (
    DAMAGED,
    ORIGINAL,
    Values,
    quantization_of,
    shown,
)
from trtforge.formats.quantized_source import QuantizedSource

MODELOPT_FILE, *_OLDER = QUANTIZATION_FILES
_OLD_FILES = dict(zip(_OLDER, ("gptq", "awq"), strict=True))


def quantization_files(directory: Path) -> tuple[Path, ...]:
    """The files beside config.json that describe a checkpoint's quantisation."""
    return tuple(directory / name for name in QUANTIZATION_FILES if (directory / name).is_file())


def read_quantized_source(config: HfConfig) -> QuantizedSource | None:
    """The quantisation of a checkpoint, None if unquantised. Raises ForgeError if it cannot be repacked.

    FP8 with block scales and experts in MXFP4 count as unquantised: they are read as bfloat16.
    """
    values = quantization_of(config.values)
    files = {path.name: path for path in quantization_files(config.path.parent)}
    if MODELOPT_FILE in files:
        path = files[MODELOPT_FILE]
        return modelopt(Values(_read(path).get("quantization"), f"{path}: quantization"))
    if config.fp8_blocks is not None or config.mxfp4_experts:
        return None
    if values is not None:
        return _by_method(Values(values, f"{config.path}: quantization_config"))
    for name, method in _OLD_FILES.items():
        if name in files:
            return _by_method(Values({"quant_method": method} | _read(files[name]), str(files[name])))
    return None


def quantization_method(config: HfConfig) -> str:
    """The name of the tool or format that quantised a checkpoint; "none" for an unquantised one."""
    files = {path.name for path in quantization_files(config.path.parent)}
    values = quantization_of(config.values)
    if isinstance(values, dict):
        return _method(Values(values, "quantization_config"))
    return "modelopt" if MODELOPT_FILE in files else next((m for n, m in _OLD_FILES.items() if n in files), "none")


def contradiction(config: HfConfig) -> str | None:
    """How hf_quant_config.json, which is read, contradicts config.json; None if it does not."""
    path, values = config.path.parent / MODELOPT_FILE, quantization_of(config.values)
    if not path.is_file() or not isinstance(values, dict):
        return None
    method = quantization_method(config)
    if not method.startswith("modelopt"):
        return f"{MODELOPT_FILE}, which is read, describes a checkpoint of ModelOpt, and config.json one of {method}"
    inside = values.get("quantization")
    stated = inside.get("quant_algo") if isinstance(inside, dict) else values.get("quant_algo")
    own = Values(_read(path).get("quantization"), str(path)).get("quant_algo")
    if stated is None or stated == own:
        return None
    return f"{MODELOPT_FILE}, which is read, says {own}, and config.json {stated}"


def require_unquantized(config: HfConfig) -> None:
    """Raises ForgeError for a quantised checkpoint that is not read as bfloat16: its scales are fixed."""
    method = quantization_method(config)
    if method != "none" and config.fp8_blocks is None and not config.mxfp4_experts:
        why = "its scales are fixed, a calibration would change nothing"
        raise ForgeError(f"{config.path.parent} is already quantised ({method}): {why}", hint=ORIGINAL)


def _by_method(values: Values) -> QuantizedSource:
    method = _method(values)
    match method:
        case "awq":
            return _awq(values)
        case "gptq":
            return _gptq(values)
        case "compressed-tensors":
            return compressed_tensors(values)
        case "fp8":
            return _fp8(values)
        case _ if method.startswith("modelopt"):
            return modelopt(values)
        case _:
            reason, hint = _REFUSED.get(method, ("its packing is not known to trtforge", ORIGINAL))
            raise values.refusal(f"quant_method {method} is not converted: {reason}", hint)


def _method(values: Values) -> str:
    """The quantisation method; early bitsandbytes and ModelOpt files lack `quant_method`."""
    unnamed = "modelopt" if values.get("quant_algo") else "unknown"
    unnamed = "bitsandbytes" if values.get("load_in_4bit", "load_in_8bit", "_load_in_4bit") else unnamed
    return str(values.get("quant_method") or unnamed).lower()


_ONE_KERNEL = "its weights are interleaved for one GPU kernel"
_REFUSED = {
    "bitsandbytes": ("TensorRT-LLM has no NF4 and no LLM.int8() layers", ORIGINAL),
    "gguf": ("GGUF's block formats have no counterpart in TensorRT-LLM", ORIGINAL),
    "exl2": ("EXL2 mixes bit widths inside a matrix", ORIGINAL),
    "exl3": ("EXL3 is a trellis code", ORIGINAL),
    "marlin": (_ONE_KERNEL, "Convert the GPTQ or AWQ checkpoint that it was made from."),
    "gptq_marlin": (_ONE_KERNEL, "Convert the GPTQ checkpoint that it was made from."),
    "awq_marlin": (_ONE_KERNEL, "Convert the AWQ checkpoint that it was made from."),
    "fbgemm_fp8": (
        "it clips activations at its scale_ub",
        "Convert the original bfloat16 checkpoint, or a compressed-tensors FP8 one.",
    ),
    "mxfp4": (
        "TensorRT-LLM engines have no MXFP4 layers",
        "Serve it with TensorRT-LLM's PyTorch backend, or convert a bfloat16 checkpoint.",
    ),
}


def _awq(values: Values) -> QuantizedSource:
    version = str(values.get("version", "format") or "gemm").lower()
    if version != "gemm":
        raise values.refusal(
            f"AWQ version {version} is not converted, only gemm is",
            "Save the model again with AutoAWQ's version gemm, or convert the original checkpoint.",
        )
    if values.get("backend") == "llm-awq":
        raise values.refusal("AWQ backend llm-awq is not converted: its packing differs from AutoAWQ's")
    values.require_int4("bits", "w_bit")
    group_size, scale_per_output = values.int4_groups("group_size", "q_group_size")
    return QuantizedSource(
        tool="AutoAWQ",
        packing="awq",
        never=("^lm_head$", *map(re.escape, values.names("modules_to_not_convert")), *_left_by_rule(values)),
        group_size=group_size,
        scale_per_output=scale_per_output,
    )


_GPTQ_STORED_ZERO = {"gptq": 7, "gptq_v2": 8}  # the first format stores zero points minus one


def _gptq(values: Values) -> QuantizedSource:
    form = "marlin" if values.get("is_marlin_format") else str(values.get("checkpoint_format", "format") or "gptq")
    if form not in _GPTQ_STORED_ZERO:
        raise values.refusal(
            f"GPTQ checkpoint_format {form} is not converted, only gptq and gptq_v2 are",
            "Save the model again with checkpoint_format gptq, or convert the original checkpoint.",
        )
    if values.get("rotation"):  # GPTQModel: models/loader.py, `_setup_rotation_online_had`
        raise values.refusal(
            f"rotation is {shown(values.get('rotation'))}: the inputs of down_proj are rotated when the model runs, "
            "which TensorRT-LLM's layers do not do",
            "Quantise without rotation, or convert the original checkpoint.",
        )
    values.require_int4("bits")
    group_size, scale_per_output = values.int4_groups("group_size")
    ordered = scale_per_output or values.get("static_groups")  # groups of consecutive inputs, whatever the order
    if values.get("desc_act") and not ordered:
        raise values.refusal(
            "desc_act is true: act-order permutes the inputs, TensorRT-LLM's groups are consecutive inputs",
            "Use a GPTQ checkpoint with desc_act false, or convert the original one.",
        )
    if values.get("lm_head"):
        raise values.refusal("lm_head is quantised: TensorRT-LLM keeps it in the model's dtype")
    return QuantizedSource(
        tool="GPTQ",
        packing="gptq",
        never=("^lm_head$", *_left_by_rule(values)),
        only=_blocks(values),
        group_size=group_size,
        scale_per_output=scale_per_output,
        stored_zero=_GPTQ_STORED_ZERO[form],
    )


_OF_ROUNDING = ("mse", "damp_percent", "damp_auto_increment", "act_group_aware", "fallback", "hessian", "gptaq", "foem")
"""Settings of GPTQModel's rules that change codes, not how they are stored."""


def _left_by_rule(values: Values) -> tuple[str, ...]:
    """The modules excluded by GPTQModel's rules (`-:`): the first rule that matches a module applies.

    Raises ForgeError for rules that set another format (quantization/config.py, `_resolve_dynamic_override`).
    """
    rules = values.part("dynamic") if values.get("dynamic") else None
    earlier, left = "", []
    for rule in rules.values if rules is not None else ():
        sign, pattern = (rule[:2], rule[2:]) if rule.startswith(("-:", "+:")) else ("+:", rule)
        pattern = values.regex(pattern)
        if sign == "-:":
            left.append(earlier + pattern)
        else:
            _require_same_format(values, rule)
            earlier += f"(?!{pattern})"
    return tuple(left)


def _require_same_format(values: Values, rule: str) -> None:
    """Raises ForgeError if a rule sets a key of the format to another value than the whole model has."""
    for key, value in values.part("dynamic").part(rule).values.items():
        if key not in _OF_ROUNDING and (value or False) != (values.get(key) or False):
            raise values.refusal(f"dynamic gives {rule} a different format ({key}): a TensorRT-LLM checkpoint has one")


def _blocks(values: Values) -> tuple[str, ...] | None:
    blocks = values.get("modules_in_block_to_quantize")
    if not blocks:
        return None
    names = [name for block in blocks for name in (block if isinstance(block, list) else [block])]
    if not all(isinstance(name, str) for name in names):
        raise values.refusal(f"modules_in_block_to_quantize is {shown(blocks)}, names are expected", DAMAGED)
    return tuple(rf"(?:^|\.){re.escape(name)}$" for name in names)


def _fp8(values: Values) -> QuantizedSource:
    """AutoFP8, and FP8 of transformers without blocks (Ministral 3): static, one scale per tensor."""
    if values.get("activation_scheme") != "static":
        raise values.refusal(
            "activation_scheme is not static: TensorRT-LLM's FP8 needs a static activation scale",
            "Convert the original checkpoint with --quant fp8 and a calibration.",
        )
    left = values.names("ignored_layers", "modules_to_not_convert")
    source = QuantizedSource(
        tool="AutoFP8",
        packing="fp8",
        never=("^lm_head$", *(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in left)),
        fp8_kv_cache=values.get("kv_cache_scheme") == "static",
    )
    if "weight_block_size" not in values.values:
        return source
    return replace(source, tool="transformers", weight_scale="weight_scale_inv", input_scale="activation_scale")


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path, hint=DAMAGED)
