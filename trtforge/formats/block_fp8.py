"""Checkpoints with E4M3 matrices and a scale for each block, such as DeepSeek-V3, R1 and Qwen3's FP8 models.

`weight_scale_inv` beside a weight multiplies it, despite its name. The checkpoint is read as the equivalent bfloat16
model. The quantisation of activations at run time (`activation_scheme` dynamic) is not part of the weights. Source:
DeepSeek-V3's inference/fp8_cast_bf16.py and README_WEIGHTS.md.
"""

from collections.abc import Mapping
from typing import Any

from trtforge.core.dtypes import dtype_named
from trtforge.core.errors import ForgeError
from trtforge.formats.quantization_values import DAMAGED, Values, quantization_of, shown
from trtforge.formats.shards import BlockScaled, StoredTensor, TensorSpec

_SCALE = "_scale_inv"
_SCALE_DTYPES = ("float32", "bfloat16", "float16")


def fp8_blocks(values: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Rows and columns of the blocks in the `quantization_config` of a config.json; None for any other checkpoint.

    `where`: the file, for errors. Raises ForgeError for an invalid size.
    """
    found = quantization_of(values)
    if not isinstance(found, dict) or str(found.get("quant_method")).lower() != "fp8":
        return None
    size = found.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(type(edge) is int and edge > 0 for edge in size):
        place = Values(found, f"{where}: quantization_config")
        raise place.refusal(f"weight_block_size is {shown(size)}, not rows and columns", DAMAGED)
    return size[0], size[1]


def as_bfloat16(tensors: Mapping[str, StoredTensor], block: tuple[int, int]) -> dict[str, StoredTensor]:
    """The tensors with each pair of codes and scales as one bfloat16 matrix.

    Raises ForgeError for scales that have no matrix or do not fit it.
    """
    found = dict(tensors)
    for name, scales in tensors.items():
        if not name.endswith(_SCALE):
            continue
        codes = tensors.get(name.removesuffix(_SCALE))
        if codes is None or codes.spec.dtype.name != "float8_e4m3fn" or len(codes.spec.shape) != 2:
            raise ForgeError(
                f"{scales.file}: {name} has no E4M3 matrix {name.removesuffix(_SCALE)}",
                hint="Fetch the checkpoint again.",
            )
        blocks = tuple(-(-size // edge) for size, edge in zip(codes.spec.shape, block, strict=True))
        if scales.spec.shape != blocks or scales.spec.dtype.name not in _SCALE_DTYPES:
            raise ForgeError(
                f"{scales.file}: {name} is {scales.spec.dtype.name} {list(scales.spec.shape)}, blocks of {block[0]} x "
                f"{block[1]} in {list(codes.spec.shape)} need {' or '.join(_SCALE_DTYPES)} {list(blocks)}",
                hint="config.json and the weights are of different models: fetch both again.",
            )
        del found[name]
        spec = TensorSpec(codes.spec.name, dtype_named("bfloat16"), codes.spec.shape)
        found[codes.spec.name] = BlockScaled(spec, codes.file, codes.offset, codes, scales, block)
    return found
