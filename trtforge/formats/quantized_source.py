"""The quantisation of an already quantised Hugging Face checkpoint: packing and covered modules.

`quantization_config` reads it from a checkpoint's JSON files.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from trtforge.formats.published_names import module_names

Packing = Literal[
    "awq", "gptq", "pack_quantized", "modelopt_int4", "modelopt_w4a8",
    "fp8", "fp8_rows", "fp8_one_scale", "int8_rows", "nvfp4",
]  # fmt: skip
"""How a weight (out, in) is stored.

`awq`: int32 (in, out / 8), `gptq`: int32 (in / 8, out), `pack_quantized`: int32 (out, in / 8), `modelopt_int4` and
`modelopt_w4a8`: uint8 (out / 2, in), `nvfp4`: uint8 (out, in / 2), `int8_rows`: int8 (out, in), the others E4M3 (out,
in). `fp8`: one weight scale and a static activation scale; with dynamic per-token activation scales, `fp8_rows`: a
weight scale per output, `fp8_one_scale`: one for all. `modelopt_w4a8` and `int8_rows` have a static activation scale.
"""

StoredFormat = Literal["int4_awq", "w4a8_awq", "fp8", "fp8_rowwise", "int8_sq", "nvfp4"]
"""The formats of `--quant` to which such sources are converted."""

_FORMAT_OF: Mapping[Packing, StoredFormat] = {
    "awq": "int4_awq",
    "gptq": "int4_awq",
    "pack_quantized": "int4_awq",
    "modelopt_int4": "int4_awq",
    "modelopt_w4a8": "w4a8_awq",
    "fp8": "fp8",
    "fp8_rows": "fp8_rowwise",
    "fp8_one_scale": "fp8_rowwise",
    "int8_rows": "int8_sq",
    "nvfp4": "nvfp4",
}

KV_SCALES = (
    "k_scale",
    "v_scale",
    "k_proj.k_scale",
    "v_proj.v_scale",
    "k_proj.output_scale",
    "v_proj.output_scale",
    "kv_scale",
)
"""Names of the KV cache's scales inside an attention module: of compressed-tensors, ModelOpt, AutoFP8 and vLLM's first
FP8 caches (vllm/model_executor/model_loader/weight_utils.py, `maybe_remap_kv_scale_name`)."""


@dataclass(frozen=True)
class QuantizedSource:
    """One quantisation for all modules that match `only` (None: every module) but not `never`.

    Both are regular expressions, searched in a module's full name. `named`: the full names of its modules, None if only
    the patterns apply. `others`: in mixed precision, the quantisations of other modules; they do not overlap.
    `scale_per_output`: INT4 scales are per output and are used for all groups of `group_size` inputs. `stored_zero`:
    the stored code of zero point 8. Tensor names inside a module: `weight_scale` and `input_scale`: the scales of FP8,
    INT8 and NVFP4's inputs; `weight` and `tensor_scale`: NVFP4's codes and its tensor scale. `divisors`: NVFP4's tensor
    and input scales are divisors.
    """

    tool: str
    packing: Packing
    never: tuple[str, ...]
    only: tuple[str, ...] | None = None
    group_size: int = 128
    scale_per_output: bool = False
    stored_zero: int = 8
    fp8_kv_cache: bool = False
    weight_scale: str = "weight_scale"
    input_scale: str = "input_scale"
    weight: str = "weight"
    tensor_scale: str = "weight_scale_2"
    divisors: bool = False
    named: frozenset[str] | None = None
    others: tuple["QuantizedSource", ...] = ()

    @property
    def format(self) -> StoredFormat:
        """The format to which it is converted; in mixed precision, that of the first quantisation."""
        return _FORMAT_OF[self.packing]

    @property
    def formats(self) -> tuple[StoredFormat, ...]:
        """The distinct formats of all its modules."""
        return tuple(dict.fromkeys(each.format for each in (self, *self.others)))

    @property
    def mixed(self) -> bool:
        """Whether its modules have different formats."""
        return len(self.formats) > 1

    @property
    def described(self) -> str:
        """Its formats, for messages."""
        return " and ".join(self.formats)

    def kv_cache_problem(self, kv_cache: str) -> str | None:
        """Why a checkpoint made from this source cannot have a KV cache of this format; None if it can.

        "none" stands for the source's own.
        """
        if self.fp8_kv_cache and kv_cache not in ("none", "fp8"):
            return f"is already quantised: {self.tool} made its KV cache fp8, not {kv_cache}"
        if kv_cache == "int8":
            return f"is already quantised ({self.tool}): an int8 KV cache needs a calibration of unquantised weights"
        return None

    @property
    def budget_problem(self) -> str:
        """Why a checkpoint made from this source cannot have a budget of bits."""
        return f"is already quantised ({self.tool}): a budget of bits cannot change its formats"

    def of(self, module: str) -> "QuantizedSource | None":
        """The quantisation of a linear layer, by its full Hugging Face name; None if it is not quantised."""
        names = module_names(module)
        return next((each for each in (self, *self.others) if each._covers(names)), None)

    def quantizes(self, module: str) -> bool:
        """Whether a linear layer, by its full Hugging Face name, is quantised."""
        return self.of(module) is not None

    def _covers(self, names: tuple[str, ...]) -> bool:
        if self.named is not None and self.named.isdisjoint(names):
            return False
        return not _matches(self.never, names) and (self.only is None or _matches(self.only, names))


def _matches(patterns: tuple[str, ...], names: tuple[str, ...]) -> bool:
    return any(pattern.search(name) for pattern in _compiled(patterns) for name in names)


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Cached, as models with many experts have tens of thousands of modules."""
    return tuple(map(re.compile, patterns))
