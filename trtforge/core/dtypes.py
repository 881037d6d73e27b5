"""Element types by their TensorRT-LLM and safetensors names, without numpy and torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from trtforge.core.errors import ForgeError

FLOAT32_BYTES = 4
"""Bytes of a float32 element, the type of most scaling factors."""

ModelDtype = Literal["float16", "bfloat16", "float32"]
MODEL_DTYPES: tuple[ModelDtype, ...] = get_args(ModelDtype)


@dataclass(frozen=True)
class Dtype:
    """One element type. `name` as in TensorRT-LLM's config.json, `safetensors` as in a file header, `size` in bytes."""

    name: str
    safetensors: str
    size: int


DTYPES = (
    Dtype("float64", "F64", 8),
    Dtype("float32", "F32", 4),
    Dtype("float16", "F16", 2),
    Dtype("bfloat16", "BF16", 2),
    Dtype("float8_e4m3fn", "F8_E4M3", 1),
    Dtype("float8_e5m2", "F8_E5M2", 1),
    Dtype("float8_e8m0fnu", "F8_E8M0", 1),
    Dtype("int64", "I64", 8),
    Dtype("int32", "I32", 4),
    Dtype("int16", "I16", 2),
    Dtype("int8", "I8", 1),
    Dtype("uint8", "U8", 1),
    Dtype("bool", "BOOL", 1),
)
_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES}


def dtype_named(name: str) -> Dtype:
    """The dtype with this TensorRT-LLM name; an unknown name is a bug in trtforge."""
    return _BY_NAME[name]


def dtype_in_file(code: str, where: str) -> Dtype:
    """The dtype with this safetensors code. Raises ForgeError naming `where` (file and tensor) if unknown."""
    try:
        return _BY_SAFETENSORS[code]
    except KeyError:
        known = ", ".join(sorted(_BY_SAFETENSORS))
        raise ForgeError(f"{where}: dtype {code} is not known", hint=f"Known dtypes: {known}.") from None


def model_dtype(requested: str, source: str) -> ModelDtype:
    """The checkpoint's dtype. `auto` keeps float16 and bfloat16 and turns float32 into float16.

    Source: `infer_dtype` in tensorrt_llm/models/convert_utils.py (0.17).
    """
    name = requested if requested != "auto" else ("float16" if source == "float32" else source)
    match name:
        case "float16" | "bfloat16" | "float32":
            return name
        case _:
            raise ForgeError(
                f"dtype {name} cannot be a TensorRT-LLM model dtype",
                hint="Choose --dtype float16, bfloat16 or float32.",
            )
