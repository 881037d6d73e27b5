"""Number formats: bytes of a weight with its scales, the compute type, and the GPUs that support them.

Bytes are those of TensorRT-LLM's checkpoint layouts (quantization/layers.py; ModelOpt's export/quant_utils.py). AWQ's
block scales are float32 there; the engine casts them to the model's dtype, so its 4-bit weights take up to 3 % less.
GPUs: FP8 needs compute capability 8.9 (TensorRT-LLM issues #1428, #4599), NVFP4 10.0; TensorRT-LLM refuses INT4 and
INT8 weights and scales per channel on 10.0 to 11.9 (quantization/functional.py, `preprocess_weights_for_mixed_gemm`,
and builder.py, 1.x).
"""

from dataclasses import dataclass
from typing import Literal

from trtforge.core.dtypes import FLOAT32_BYTES
from trtforge.core.recipe import KvCacheFormat, QuantFormat
from trtforge.models.formats import CACHE_ALGORITHMS, FORMATS

Compute = Literal["float16", "int8", "fp8", "fp4"]
"""The types that tensor cores multiply; bfloat16 runs at float16's rate."""

_COMPUTE_BITS: dict[Compute, int] = {"float16": 16, "int8": 8, "fp8": 8, "fp4": 4}

_EVERY_SM = range(0, 1000)
_FROM_ADA = range(89, 1000)
_FROM_BLACKWELL = range(100, 1000)
_DATACENTER_BLACKWELL = range(100, 120)
_NONE = range(0)


@dataclass(frozen=True)
class WeightFormat:
    """How a format stores a linear layer (out, in), in bytes; `bits` None is the model's dtype.

    `per_linear`: scales that all experts of a layer share, such as the activations'. `grouped`: weights share scales in
    groups along the input, of `group_size` if the format fixes it. `padded_to`: TensorRT-LLM pads a layer whose inputs
    or outputs per rank are not a multiple of this (or of the group size), and the checkpoint then no longer fits. `sm`:
    compute capability x 10. `loss`: loss of accuracy, 0 none to 4 high, in the order of
    docs/source/blogs/quantization-in-TRT-LLM.md.
    """

    name: QuantFormat
    bits: int | None
    compute: Compute
    loss: int
    sm: range = _EVERY_SM
    refused_sm: range = _NONE
    per_matrix: int = 0
    per_linear: int = 0
    per_output: int = 0
    per_group: int = 0
    per_input_elements: int = 0
    grouped: bool = False
    group_size: int | None = None
    padded_to: int = 1
    quantizes_head: bool = False

    @property
    def algorithm(self) -> str | None:
        """TensorRT-LLM's name for it."""
        return FORMATS[self.name].algorithm

    @property
    def calibrated(self) -> bool:
        """Whether its scales are measured on data."""
        return FORMATS[self.name].calibrated

    @property
    def unpacked(self) -> bool:
        """Whether kernels dequantise the weights before they multiply."""
        return self.bits is not None and self.bits < _COMPUTE_BITS[self.compute]

    def nbytes(self, count: int, out: int, inputs: int, itemsize: int, group_size: int) -> int:
        """Bytes of `count` (out, in) matrices with their scales, in a model whose dtype has `itemsize` bytes."""
        weight = out * inputs * itemsize if self.bits is None else -(-out * inputs * self.bits // 8)
        groups = out * (inputs // (self.group_size or group_size)) if self.grouped else 0
        scales = self.per_matrix + self.per_output * out + self.per_group * groups
        return count * (weight + scales + self.per_input_elements * inputs * itemsize) + self.per_linear

    def runs_on(self, sm: int) -> bool:
        """Whether TensorRT-LLM runs the format at a compute capability (x 10)."""
        return sm in self.sm and sm not in self.refused_sm


@dataclass(frozen=True)
class CacheFormat:
    """How the KV cache stores a value; `itemsize` None is the model's dtype. `per_layer`: bytes of scales."""

    name: KvCacheFormat
    itemsize: int | None
    loss: int
    sm: range = _EVERY_SM
    per_layer: int = 0

    @property
    def algorithm(self) -> str | None:
        """TensorRT-LLM's name for it."""
        return CACHE_ALGORITHMS[self.name]

    @property
    def calibrated(self) -> bool:
        """Whether its scales must be measured on data; an FP8 cache defaults to scales of 1."""
        return self.name == "int8"

    def runs_on(self, sm: int) -> bool:
        """Whether TensorRT-LLM runs the format at a compute capability (x 10)."""
        return sm in self.sm


WEIGHT_FORMATS = (
    WeightFormat("none", None, "float16", loss=0),
    # weights_scaling_factor and activation_scaling_factor, one of each
    WeightFormat("fp8", 8, "fp8", loss=1, sm=_FROM_ADA, per_matrix=FLOAT32_BYTES, per_linear=FLOAT32_BYTES),
    # per_channel_scale; activations are quantised per token at run time
    WeightFormat(
        "fp8_rowwise", 8, "fp8", loss=1, sm=_FROM_ADA, refused_sm=_DATACENTER_BLACKWELL,
        per_output=FLOAT32_BYTES,
    ),
    # per_channel_scale in the model's dtype; trtllm-build makes it from plain weights when it loads them
    WeightFormat("int8_wo", 8, "float16", 2, refused_sm=_DATACENTER_BLACKWELL, per_output=2, padded_to=64),
    WeightFormat("int4_wo", 4, "float16", 4, refused_sm=_DATACENTER_BLACKWELL, per_output=2, padded_to=64),
    # weights_scaling_factor (out,), activation_scaling_factor (1,), prequant_scaling_factor (in,)
    WeightFormat(
        "int8_sq", 8, "int8", loss=3, refused_sm=_DATACENTER_BLACKWELL, per_linear=FLOAT32_BYTES,
        per_output=FLOAT32_BYTES, per_input_elements=1,
    ),
    # weights_scaling_factor (out, in / group), prequant_scaling_factor (in,)
    WeightFormat(
        "int4_awq", 4, "float16", loss=2, refused_sm=_DATACENTER_BLACKWELL, per_group=FLOAT32_BYTES,
        per_input_elements=1, grouped=True, padded_to=64,
    ),
    # as int4_awq, plus weights_scaling_factor_2 and activation_scaling_factor
    WeightFormat(
        "w4a8_awq", 4, "fp8", loss=2, sm=_FROM_ADA, refused_sm=_DATACENTER_BLACKWELL,
        per_matrix=FLOAT32_BYTES, per_linear=FLOAT32_BYTES, per_group=FLOAT32_BYTES,
        per_input_elements=1, grouped=True, padded_to=128,
    ),
    # an E4M3 scale per 16 inputs, and two float32 scales
    WeightFormat(
        "nvfp4", 4, "fp4", loss=2, sm=_FROM_BLACKWELL, per_matrix=FLOAT32_BYTES, per_linear=FLOAT32_BYTES, per_group=1,
        grouped=True, group_size=16,
    ),
)  # fmt: skip
CACHE_FORMATS = (
    CacheFormat("none", None, loss=0),
    CacheFormat("fp8", 1, loss=1, sm=_FROM_ADA, per_layer=FLOAT32_BYTES),
    CacheFormat("int8", 1, loss=2, per_layer=FLOAT32_BYTES),
)
WEIGHTS: dict[str, WeightFormat] = {format.name: format for format in WEIGHT_FORMATS}
CACHES: dict[str, CacheFormat] = {format.name: format for format in CACHE_FORMATS}
BY_ALGORITHM = {format.algorithm: format for format in WEIGHT_FORMATS}
CACHE_BY_ALGORITHM = {format.algorithm: format for format in CACHE_FORMATS}
