"""Reads checkpoints with MXFP4 experts, such as OpenAI's GPT-OSS, as the equivalent bfloat16 model.

`gate_up_proj_blocks` and `down_proj_blocks` (experts, out, in / 32, 16) contain two E2M1 codes per byte, the `_scales`
of the same name (experts, out, in / 32) a power of two (E8M0) per 32 codes. Source: transformers/integrations/mxfp4.py
(5.23), `_convert_moe_packed_tensors`.
"""

from collections.abc import Mapping
from typing import Any

from trtforge.core.dtypes import dtype_named
from trtforge.core.errors import ForgeError
from trtforge.formats.quantization_values import quantization_of
from trtforge.formats.shards import Mxfp4Experts, StoredTensor, TensorSpec

_ARCHITECTURE = "GptOssForCausalLM"
_CODES, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16


def stored_so(values: Mapping[str, Any]) -> bool:
    """Whether a config.json describes MXFP4 experts."""
    found, names = quantization_of(values), values.get("architectures")
    method = str(found.get("quant_method")).lower() if isinstance(found, dict) else ""
    return method == "mxfp4" and isinstance(names, list) and names[:1] == [_ARCHITECTURE]


def as_bfloat16(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors with each pair of codes and scales as one bfloat16 tensor (experts, in, out).

    Raises ForgeError for scales without codes, codes without scales, and for codes and scales that do not match.
    """
    found = dict(tensors)
    for name in tensors:
        if not name.endswith((_CODES, _SCALES)):
            continue
        base = name[: -len(_CODES)]
        codes, scales = tensors.get(base + _CODES), tensors.get(base + _SCALES)
        if codes is None or scales is None:
            missing = base + (_CODES if codes is None else _SCALES)
            raise ForgeError(f"{tensors[name].file}: {name} has no {missing}", hint="Fetch the checkpoint again.")
        del found[name]
        found[base] = _pair(base, codes, scales)
    return found


def _pair(name: str, codes: StoredTensor, scales: StoredTensor) -> Mxfp4Experts:
    shape = codes.spec.shape
    fits = len(shape) == 4 and shape[3] == _BLOCK_BYTES and scales.spec.shape == shape[:3]
    if not fits or {codes.spec.dtype.name, scales.spec.dtype.name} != {"uint8"}:
        raise ForgeError(
            f"{codes.file}: {codes.spec.name} is {codes.spec.dtype.name} {list(shape)} and {scales.spec.name} "
            f"{scales.spec.dtype.name} {list(scales.spec.shape)}: MXFP4 has uint8 of experts, outputs, blocks and "
            f"{_BLOCK_BYTES} bytes, with a scale for each block",
            hint="Fetch the checkpoint again.",
        )
    experts, out, blocks, _ = shape
    spec = TensorSpec(name, dtype_named("bfloat16"), (experts, blocks * 2 * _BLOCK_BYTES, out))
    return Mxfp4Experts(spec, codes.file, codes.offset, codes, scales)
