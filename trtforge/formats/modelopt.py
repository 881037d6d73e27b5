"""Reads ModelOpt's description of a quantised checkpoint, for algorithms that TensorRT-LLM's engines have.

Source: `process_layer_quant_config` in modelopt's export/quant_utils.py and export/convert_hf_config.py (0.47).
Algorithms of engines: `QuantAlgo` in tensorrt_llm/quantization/mode.py and the classes of quantization/layers.py (1.2).
"""

import re
from collections.abc import Mapping
from fnmatch import translate

from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.formats.mixed_source import mixed_source
from trtforge.formats.quantization_values import ORIGINAL, Values, static_fp8_kv_cache
from trtforge.formats.quantized_source import Packing, QuantizedSource
from trtforge.formats.trtllm import MIXED_PRECISION

_TOOL = "ModelOpt"
_PACKINGS: Mapping[str, Packing] = {
    "W4A16_AWQ": "modelopt_int4",
    "W4A8_AWQ": "modelopt_w4a8",
    "NVFP4": "nvfp4",
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_rows",
    "W8A8_SQ_PER_CHANNEL": "int8_rows",
}
_GROUPED = ("modelopt_int4", "modelopt_w4a8")
_NO_LAYERS = "TensorRT-LLM's engines have no such layers"
_PUBLISHED = "Serve it with TensorRT-LLM's PyTorch backend, or convert the original checkpoint."
_REFUSED: Mapping[str, tuple[str, str]] = {
    "W8A16": (
        "TensorRT-LLM's build rounds INT8 weights itself, with other scales, so these codes would be rounded again",
        "Convert the original checkpoint with --quant int8_wo.",
    ),
    "NVFP4_AWQ": (
        "TensorRT-LLM's FP4 layers do not multiply inputs by a pre-quantisation scale",
        "Export it with NVFP4_DEFAULT_CFG, or convert the original checkpoint with --quant nvfp4.",
    ),
    "NVFP4_SVD": (
        "TensorRT-LLM's FP4 layers have no low-rank part",
        "Export it with NVFP4_DEFAULT_CFG, or convert the original checkpoint with --quant nvfp4.",
    ),
    "W4A16_NVFP4": (
        "TensorRT-LLM's FP4 layers quantise inputs, for which these weights have no scale",
        "Export it with NVFP4_DEFAULT_CFG, or convert the original checkpoint with --quant nvfp4.",
    ),
    "W4A8_NVFP4_FP8": (_NO_LAYERS, _PUBLISHED),
    "W4A8_MXFP4_FP8": (_NO_LAYERS, _PUBLISHED),
    "MXFP4": (_NO_LAYERS, _PUBLISHED),
    "MXFP8": (_NO_LAYERS, _PUBLISHED),
    "FP8_PB_WO": (_NO_LAYERS, "Convert the original checkpoint with --quant fp8, or serve this with backend llmapi."),
    "FP8_PB_REAL": (_NO_LAYERS, "Convert the original checkpoint with --quant fp8, or serve this with backend llmapi."),
}


def modelopt(values: Values) -> QuantizedSource:
    """The description of a ModelOpt checkpoint. Raises ForgeError, with the reason, for other algorithms."""
    if values.get("quantization"):  # config.json may contain the content of hf_quant_config.json, as vLLM reads it
        values = values.part("quantization")
    algorithm = values.get("quant_algo")
    if algorithm is None:
        raise values.refusal(
            "quant_algo is null: no weight is quantised",
            "Convert the original checkpoint, with --kv-cache fp8 for an FP8 KV cache.",
        )
    if algorithm == MIXED_PRECISION:
        return _mixed(values)
    packing, group = _packing(values)
    return QuantizedSource(
        tool=_TOOL,
        packing=packing,
        never=("^lm_head$", *(_wildcard(name) for name in values.names("exclude_modules", "ignore"))),
        group_size=group,
        fp8_kv_cache=_fp8_kv_cache(values),
    )


def _mixed(values: Values) -> QuantizedSource:
    """The description by ModelOpt's `auto_quantize`: formats by layer names; other layers are not quantised."""
    named: dict[tuple[Packing, int], set[str]] = {}
    layers = values.part("quantized_layers")
    for name in layers.values:
        named.setdefault(_packing(layers.part(name)), set()).add(name)
    cache = _fp8_kv_cache(values)
    return mixed_source(
        values,
        tuple(
            QuantizedSource(_TOOL, packing, (), group_size=group, fp8_kv_cache=cache, named=frozenset(names))
            for (packing, group), names in named.items()
        ),
    )


def _packing(values: Values) -> tuple[Packing, int]:
    """The packing of an algorithm, and its group size. Raises ForgeError for an algorithm that is not converted."""
    algorithm = str(values.get("quant_algo"))
    packing = _PACKINGS.get(algorithm)
    if packing is None:
        reason, hint = _REFUSED.get(algorithm.upper(), (f"{', '.join(_PACKINGS)} are", _OTHERWISE))
        raise values.refusal(f"ModelOpt's {algorithm} is not converted: {reason}", hint)
    if values.get("has_zero_point"):
        raise values.refusal(f"has_zero_point is true: TensorRT-LLM's {algorithm} is written without zero points")
    if packing in _GROUPED:
        return packing, values.group_size("group_size", algorithm=algorithm)
    if packing == "nvfp4":
        block = values.get("group_size") or NVFP4_BLOCK
        values.require("group_size", block, (NVFP4_BLOCK,), f"NVFP4 blocks are of {NVFP4_BLOCK} inputs")
        return packing, NVFP4_BLOCK
    return packing, 128


_OTHERWISE = f"Export one of those with ModelOpt, or {ORIGINAL[0].lower()}{ORIGINAL[1:]}"


def _fp8_kv_cache(values: Values) -> bool:
    """Whether the KV cache is FP8. Raises ForgeError for other formats."""
    scheme = values.get("kv_cache_scheme")
    cache = values.get("kv_cache_quant_algo") or (scheme if isinstance(scheme, str) else None)
    if cache not in ("FP8", None):
        raise values.refusal(
            f"kv_cache_quant_algo is {cache}: only an FP8 KV cache is converted",
            "Export it with FP8_KV_CFG or without a quantised KV cache, or convert the original checkpoint.",
        )
    return cache == "FP8" or static_fp8_kv_cache(values)


def _wildcard(name: str) -> str:
    """A pattern for module names with wildcards; submodules of an excluded module are excluded too."""
    return rf"^(?:{translate(name)}|{re.escape(name)}\.)"
