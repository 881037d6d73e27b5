"""The C declarations of the kernels' arguments for ctypes: structures, and each function's argument types."""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

_pointer, _integer, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Linear(ctypes.Structure):
    """`Linear` of source/linears.h."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "weight", "scales", "bias", "y", "prequant", "scaled")),
        *((name, _integer) for name in ("rows", "inputs", "outputs", "group")),
    )


class IntegerLinear(ctypes.Structure):
    """`IntegerLinear` of source/linears.h."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "weight", "offsets", "prequant", "scales", "bias", "codes", "y")),
        *((name, _integer) for name in ("rows", "inputs", "outputs")),
        ("activation_scale", _float),
    )


class FloatLinear(ctypes.Structure):
    """`FloatLinear` of source/linears.h."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "weight", "bias", "y")),
        *((name, _integer) for name in ("rows", "inputs", "outputs")),
    )


class ExpandedLinear(ctypes.Structure):
    """`ExpandedLinear` of source/linears.h."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "weight", "scales", "bias", "prequant", "y")),
        *((name, _integer) for name in ("rows", "inputs", "outputs", "group", "format", "kind")),
        *((name, _float) for name in ("factor", "activation_scale")),
    )


class ScreenedLinear(ctypes.Structure):
    """`ScreenedLinear` of source/linears.h."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "weight", "bias", "codes", "scales")),
        *((name, _pointer) for name in ("errors", "y", "most", "pause", "keys", "factors", "distances")),
        *((name, _integer) for name in ("rows", "inputs", "outputs", "format", "by_products", "first")),
        ("farthest", _float),
    )


class AnyNorm(ctypes.Structure):
    """`Norm` of source/norms.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "weight", "bias", "y")),
        *((name, _integer) for name in ("outer", "stride", "into", "inner", "size", "pitch")),
        ("epsilon", _float),
    )


class Paged(ctypes.Structure):
    """`Paged` of source/attention.h."""

    _fields_ = (
        *((name, _pointer) for name in ("queries", "cache", "out", "tables", "lengths", "slopes", "sinks", "seen")),
        *((name, _integer) for name in ("rows", "columns", "block", "vectors", "stride")),
        *((name, _integer) for name in ("heads", "kv_heads", "size", "window", "chunk")),
        *((name, _float) for name in ("scale", "cap", "cache_scale")),
    )


class HeadProducts(ctypes.Structure):
    """`HeadProducts` of source/heads.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "weight", "y")),
        *((name, _integer) for name in ("rows", "heads", "inputs", "outputs")),
        *((name, _integer) for name in ("x_row", "x_head", "y_row", "y_head")),
    )


class Adapters(ctypes.Structure):
    """`Adapters` of source/adapters.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "a", "b", "y", "slots", "ranks", "modules")),
        *((name, _integer) for name in ("rows", "count", "inputs", "outputs", "rank", "stride")),
    )


class Context(ctypes.Structure):
    """`Context` of source/context.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("queries", "cache", "out", "table", "slopes", "sinks", "packed")),
        *((name, _integer) for name in ("count", "start", "block", "stride")),
        *((name, _integer) for name in ("heads", "kv_heads", "size", "window", "chunk")),
        *((name, _float) for name in ("scale", "cap", "cache_scale")),
    )


class Routing(ctypes.Structure):
    """`Routing` of source/experts.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("logits", "bias", "weights", "experts")),
        *((name, _integer) for name in ("rows", "num_experts", "top_k", "groups", "top_groups")),
        *((name, _integer) for name in ("scoring", "renormalize")),
        ("scaling", _float),
    )


class Expert(ctypes.Structure):
    """`Expert` of source/experts.cpp."""

    _fields_ = (("calls", _pointer), ("row_counts", _pointer), ("count", _integer), ("computed", _pointer))


class Mixture(ctypes.Structure):
    """`Mixture` of source/experts.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "weights", "chosen", "experts", "gathered", "out")),
        *((name, _integer) for name in ("rows", "size", "top_k", "first", "local", "capacity")),
        *((name, _integer) for name in ("on_inputs", "accumulate")),
    )


class DeltaTokens(ctypes.Structure):
    """`DeltaTokens` of source/delta_rule.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("from", "to", "queries", "keys", "values", "rates", "decays", "out")),
        *((name, _integer) for name in ("rows", "heads", "key_size", "value_size")),
    )


class DeltaSequence(ctypes.Structure):
    """`DeltaSequence` of source/delta_rule.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("from", "to", "queries", "keys", "values", "rates", "decays", "out")),
        *((name, _integer) for name in ("tokens", "heads", "key_size", "value_size")),
    )


class DeltaInputs(ctypes.Structure):
    """`DeltaInputs` of source/linear_attention.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("convolved", "projected", "decay", "bias")),
        *((name, _pointer) for name in ("queries", "keys", "values", "rates", "decays")),
        *((name, _integer) for name in ("tokens", "key_heads", "value_heads", "key_size", "value_size")),
    )


class GatedNorm(ctypes.Structure):
    """`GatedNorm` of source/linear_attention.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "gates", "weight", "y")),
        *((name, _integer) for name in ("rows", "size")),
        ("epsilon", _float),
    )


class Rounding(ctypes.Structure):
    """`Rounding` of source/rounding.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("columns", "product", "shares", "quanta", "ends", "levels", "errors")),
        ("residuals", _pointer),
        *((name, _integer) for name in ("block", "outputs")),
    )


class Refinement(ctypes.Structure):
    """`Refinement` of source/rounding.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("levels", "gradients", "gram", "diagonal", "scales")),
        *((name, _pointer) for name in ("groups", "steps", "ends")),
        *((name, _integer) for name in ("outputs", "inputs", "count", "sweeps")),
    )


class Steps(ctypes.Structure):
    """`Steps` of source/rounding.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("columns", "weights", "candidates", "best")),
        *((name, _integer) for name in ("group", "outputs", "count")),
    )


class Draws(ctypes.Structure):
    """`Draws` of source/sampling.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("logits", "places", "top_k", "top_p", "min_p", "keys", "tokens", "weights")),
        *((name, _integer) for name in ("rows", "vocabulary", "stride")),
    )


class Call(ctypes.Structure):
    """`Call` of source/calls.h."""

    _fields_ = (("kernel", _integer), ("arguments", _integer * 10))


Calls: TypeAlias = "ctypes.Array[Call]"


class RowCount(ctypes.Structure):
    """`RowCount` of source/calls.h."""

    _fields_ = (("place", _pointer), ("each", _integer), ("of_wanted", _integer))


RowCounts: TypeAlias = "ctypes.Array[RowCount]"


def as_integer(kind: object, argument: Any) -> int:
    """An argument of this type as the 8-byte integer that `Call` stores."""
    if kind is _float:
        return int.from_bytes(struct.pack("<fxxxx", argument), "little")
    if isinstance(argument, ctypes.Structure):
        return ctypes.addressof(argument)
    return 0 if argument is None else int(argument)


ARGUMENTS: dict[str, Sequence[object]] = {
    "rms_norm": (_integer, _pointer, _pointer, _pointer, *(_integer,) * 5, _float),
    "add": (_integer, _pointer, _pointer, _pointer, _integer, _float),
    "add_rms_norm": (_integer, *(_pointer,) * 5, _integer, _integer, _float, _float),
    "rotate": (_integer, _pointer, _pointer, _pointer, *(_integer,) * 6),
    "rotation": (_integer, *(_pointer,) * 4, _integer, _integer, _float, _integer),
    "lookup": (_integer, *(_pointer,) * 3, *(_integer,) * 4, _float),
    "gate": (_integer, _integer, _integer, _pointer, _pointer, _integer, _integer),
    "write_slots": (_pointer, _integer, _pointer, _integer, _integer, _pointer),
    "quantize_slots": (_integer, _integer, _pointer, _integer, _pointer, _integer, _integer, _pointer, _float),
    "paged_attention": (_integer, _integer, _pointer),
    "add_adapters": (_integer, _pointer),
    "context_attention": (_integer, _integer, _pointer),
    "linear_bfloat16": (_pointer,),
    "linear_int4": (_pointer,),
    "linear_int8": (_integer, _pointer),
    "linear_float32": (_pointer,),
    "linear_expanded": (_integer, _pointer),
    "linear_screened": (_integer, _pointer),
    "screen": (_integer, *(_pointer,) * 4, _integer, _integer),
    "norm": (_integer, _integer, _integer, _pointer),
    "activate": (_integer, _integer, _pointer, _pointer, _integer),
    "sum_ranks": (_integer, _pointer, _integer, _pointer, _pointer, _integer, _integer),
    "widen": (_pointer, _pointer, _integer),
    "gate_pairs": (_integer, _pointer, _pointer, _integer, _integer, _float, _float),
    "scale_rows_by_gate": (_integer, _pointer, _pointer, _pointer, *(_integer,) * 3),
    "route": (_pointer,),
    "mix_experts": (_integer, _pointer),
    "convolve": (_integer, *(_pointer,) * 3, *(_integer,) * 4),
    "delta_inputs": (_integer, _pointer),
    "delta_tokens": (_pointer,),
    "delta_sequence": (_pointer,),
    "norm_gated": (_integer, _pointer),
    "project_heads": (_integer, _pointer),
    "copy_heads": (_pointer, _pointer, *(_integer,) * 7),
    "replay": (_pointer, _integer),
    "set_rows": (_pointer, _integer, _integer, _integer),
    "use_own_threads": (_integer,),
    "release_threads": (),
    "round_block": (_integer, _integer, _pointer),
    "refine": (_integer, _integer, _pointer),
    "best_steps": (_integer, _pointer),
    "draw_tokens": (_pointer,),
    "log_sums": (_pointer, _pointer, _integer, _integer, _integer),
}
RECORDED = (
    "rms_norm",
    "add",
    "add_rms_norm",
    "rotate",
    "gate",
    "write_slots",
    "quantize_slots",
    "paged_attention",
    "add_adapters",
    "linear_bfloat16",
    "linear_int4",
    "linear_int8",
    "linear_float32",
    "norm",
    "activate",
    "sum_ranks",
    "widen",
    "gate_pairs",
    "scale_rows_by_gate",
    "route",
    "mix_experts",
    "rotation",
    "lookup",
    "linear_expanded",
    "project_heads",
    "copy_heads",
    "linear_screened",
)
"""The kernels that `replay` can call, in the order of `Kernel` in source/calls.h."""
ROWS: dict[str, int | tuple[int, str]] = {
    "rms_norm": 4,
    "add": 4,
    "add_rms_norm": 6,
    "rotate": 4,
    "gate": 5,
    "write_slots": 3,
    "quantize_slots": 5,
    "paged_attention": (2, "rows"),
    "add_adapters": (1, "rows"),
    "linear_bfloat16": (0, "rows"),
    "linear_int4": (0, "rows"),
    "linear_int8": (1, "rows"),
    "linear_float32": (0, "rows"),
    "norm": (3, "outer"),
    "activate": 4,
    "sum_ranks": 2,
    "widen": 2,
    "gate_pairs": 3,
    "scale_rows_by_gate": 4,
    "route": (0, "rows"),
    "mix_experts": (1, "rows"),
    "rotation": 5,
    "lookup": 4,
    "linear_expanded": (1, "rows"),
    "project_heads": (1, "rows"),
    "copy_heads": 2,
    "linear_screened": (1, "rows"),
}
"""The argument of each recorded kernel, or the field of an argument, that is its row count or a multiple of it."""

FORMATS = ("bfloat16", "float16", "int8", "e4m3", "int4", "e2m1")
"""Weight formats of `linear_expanded`: `Format` of source/linears.h."""
INPUTS = ("as they are", "e4m3", "int8", "e4m3 by row", "nvfp4", "int8 by group")
"""How `linear_expanded` rounds activations: `Inputs` of source/linears.h."""

PRODUCTS = ("linear_bfloat16", "linear_int4")
"""Kernels that need AVX512BW."""
INTEGERS = ("linear_int8",)
"""Kernels that also need AVX512-VNNI."""
