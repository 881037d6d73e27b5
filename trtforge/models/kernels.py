"""The embedded engine's kernels: which one computes a linear layer in a format, and its memory.

Needs no torch; the kernels themselves are in `runtime.linears`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from trtforge.core.device import UsableDevice
from trtforge.core.dtypes import FLOAT32_BYTES, ModelDtype, dtype_named
from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.core.recipe import QuantFormat

KernelName = Literal[
    "dense",
    "plain_native_cpu",
    "fp8_dense",
    "fp8_native_cpu",
    "fp8_codes_cuda",
    "fp8_scaled_mm",
    "fp8_rowwise_dense",
    "fp8_rowwise_native_cpu",
    "fp8_rowwise_codes_cuda",
    "int4_dense",
    "int4_coded_cpu",
    "int4_native_cpu",
    "int4_packed_cpu",
    "int4_packed_cuda",
    "int8_dense",
    "int8_native_cpu",
    "int8_codes_cuda",
    "int8_sq_dense",
    "int8_sq_cpu",
    "int8_sq_codes_cuda",
    "nvfp4_dense",
    "nvfp4_native_cpu",
    "nvfp4_packed_cuda",
    "w4a8_dense",
    "w4a8_native_cpu",
    "w4a8_packed_cpu",
    "w4a8_packed_cuda",
]

TRITON_SM, FP8_SM = 80, 89
"""Lowest compute capabilities x 10 for Triton's kernels and for E4M3 products."""
CUDA_KERNELS = tuple(name for name in get_args(KernelName) if name.endswith("_cuda"))
"""Kernels in Triton's language, which use weights as they are stored."""

REFERENCE: dict[QuantFormat, KernelName] = {
    "none": "dense",
    "fp8": "fp8_dense",
    "fp8_rowwise": "fp8_rowwise_dense",
    "int8_sq": "int8_sq_dense",
    "int8_wo": "int8_dense",
    "int4_awq": "int4_dense",
    "int4_wo": "int4_dense",
    "w4a8_awq": "w4a8_dense",
    "nvfp4": "nvfp4_dense",
}
"""Reference kernels, for any device and compute dtype."""

PACKED_GROUPS = (256, 128, 64, 32)
"""Group sizes that the packed int4 kernels support."""


CPU_OUTPUTS, CPU_INPUTS = 32, 16
"""The CPU kernels can expand a layer's weights if its sizes are multiples of these."""
TILE_OUTPUTS, TILE_INPUTS = 64, PACKED_GROUPS[-1]
"""GPU kernels can use 4-bit weights in tiles if the layer's sizes are multiples of these."""
UNSUITED: dict[KernelName, KernelName] = {
    "plain_native_cpu": "dense",
    "fp8_native_cpu": "fp8_dense",
    "fp8_rowwise_native_cpu": "fp8_rowwise_dense",
    "int8_native_cpu": "int8_dense",
    "int4_coded_cpu": "int4_dense",
    "int4_native_cpu": "int4_dense",
    "w4a8_native_cpu": "w4a8_dense",
    "int4_packed_cuda": "int4_dense",
    "w4a8_packed_cuda": "w4a8_dense",
    "nvfp4_native_cpu": "nvfp4_dense",
    "nvfp4_packed_cuda": "nvfp4_dense",
}
"""The kernels for layers of other sizes."""


def suits_cpu(outputs: int, inputs: int) -> bool:
    """Whether the CPU kernels can expand the weights of a layer of this size."""
    return outputs % CPU_OUTPUTS == 0 and inputs % CPU_INPUTS == 0


def suits_tiles(outputs: int, inputs: int) -> bool:
    """Whether 4-bit weights of a layer of this size are in tiles on a GPU."""
    return outputs % TILE_OUTPUTS == 0 and inputs % TILE_INPUTS == 0


_SCREENED_BYTES = 32 << 20
"""Least bytes, in 16 bits, of an LM head that is screened; processor caches keep much of smaller heads."""

MOST_DRAWN = 4
"""The most rows of a step that can be screened if one of them samples from all tokens; with more rows, all logits are
computed. No processor screens more rows (MOST_ROWS of runtime/native/source/screened.cpp)."""


def screen_bytes(outputs: int, inputs: int) -> int:
    """Additional bytes for screening an LM head's tokens on the CPU (runtime.native.screened).

    They are 8-bit codes, and a scale and an error for each output. 0 for LM heads that are too small.
    """
    if not suits_cpu(outputs, inputs) or 2 * outputs * inputs < _SCREENED_BYTES:
        return 0
    return outputs * (inputs + 2 * FLOAT32_BYTES)


def kernel_of_size(name: KernelName, outputs: int, inputs: int, group_size: int) -> KernelName:
    """The kernel for a layer of this size if `name` is preferred. `group_size`: of INT4 weights."""
    suits = suits_tiles(outputs, inputs) if name.endswith("_packed_cuda") else suits_cpu(outputs, inputs)
    if name.startswith(("int4", "w4a8")):
        suits = suits and group_size in PACKED_GROUPS and inputs % group_size == 0
    return name if suits else UNSUITED.get(name, name)


_CODES_ON_GPUS: dict[QuantFormat, KernelName] = {
    "fp8": "fp8_codes_cuda",
    "fp8_rowwise": "fp8_rowwise_codes_cuda",
    "int8_wo": "int8_codes_cuda",
    "int8_sq": "int8_sq_codes_cuda",
    "nvfp4": "nvfp4_packed_cuda",
}
"""Kernels that use weights as they are stored, with any group size."""


def kernel_for(
    format: QuantFormat,
    group_size: int,
    device: UsableDevice,
    dtype: ModelDtype,
    *,
    vnni: bool,
    native: bool,
    sm: int,
    int8_activations: bool = False,
) -> KernelName:
    """The fastest kernel.

    `vnni`: the CPU has VNNI; `native`: trtforge's own CPU kernels are available; `sm`: compute capability x 10 of the
    GPU, 0 without one; `int8_activations`: INT4 layers may round their activations to 8 bits.
    """
    grouped = format == "int4_wo" or group_size in PACKED_GROUPS
    packs = dtype == "bfloat16" and grouped
    codes = dtype == "bfloat16" and sm >= TRITON_SM
    native = native and dtype != "float16"
    match format, device:
        case "fp8", "cuda" if sm >= FP8_SM:
            return "fp8_scaled_mm"
        case _, "cuda" if codes and format in _CODES_ON_GPUS:
            return _CODES_ON_GPUS[format]
        case "w4a8_awq", "cuda" if codes and grouped:
            return "w4a8_packed_cuda"
        case "int4_awq" | "int4_wo", "cuda" if codes and grouped:
            return "int4_packed_cuda"
        case "int4_awq" | "int4_wo", "cpu" if native and grouped:
            return "int4_coded_cpu" if int8_activations else "int4_native_cpu"
        case "int4_awq" | "int4_wo", "cpu" if packs:
            return "int4_packed_cpu"
        case "w4a8_awq", "cpu" if native and grouped:
            return "w4a8_native_cpu"
        case "w4a8_awq", "cpu" if packs:
            return "w4a8_packed_cpu"
        case "int8_sq", "cpu" if vnni or native:
            return "int8_sq_cpu"
        case "fp8", "cpu" if native:
            return "fp8_native_cpu"
        case "fp8_rowwise", "cpu" if native:
            return "fp8_rowwise_native_cpu"
        case "nvfp4", "cpu" if native:
            return "nvfp4_native_cpu"
        case "int8_wo", "cpu" if native:
            return "int8_native_cpu"
        case _:
            return REFERENCE[format]


def plain_kernel(checkpoint: ModelDtype, device: UsableDevice, dtype: ModelDtype, *, native: bool) -> KernelName:
    """The kernel of linear layers that are not quantised: in float32, 16-bit weights are used as they are."""
    keeps = device == "cpu" and native and checkpoint != "float32" and dtype == "float32"
    return "plain_native_cpu" if keeps else "dense"


@dataclass(frozen=True)
class Kept:
    """Memory that a kernel needs for an (out, in) layer, without its bias.

    `bits`: of a weight; None: the compute dtype, or with `wide` float32 instead of float16. `per_layer`, `per_output`,
    `per_input`, `per_group_bytes` and `per_block_bytes` are bytes; `per_group` and `per_input_elements` are elements of
    the compute dtype. Groups are counted per output; blocks are NVFP4's.
    """

    bits: int | None = None
    wide: bool = False
    per_layer: int = 0
    per_output: int = 0
    per_input: int = 0
    per_group: int = 0
    per_group_bytes: int = 0
    per_block_bytes: int = 0
    per_input_elements: int = 0

    def nbytes(self, out: int, inputs: int, dtype: ModelDtype, group_size: int, *, prescaled: bool) -> int:
        """Bytes of one layer. `prescaled`: whether the format has a pre-quantisation scale."""
        size = dtype_named(dtype).size
        value = dtype_named("float32").size if self.wide and dtype == "float16" else size
        weight = out * inputs * value if self.bits is None else -(-out * inputs * self.bits // 8)
        groups = out * (inputs // group_size) * (self.per_group * size + self.per_group_bytes)
        blocks = out * (inputs // NVFP4_BLOCK) * self.per_block_bytes
        vectors = self.per_output * out + self.per_input * inputs
        prescale = self.per_input_elements * inputs * size if prescaled else 0
        return weight + groups + blocks + vectors + prescale + self.per_layer


KEPT: dict[KernelName, Kept] = {
    "dense": Kept(),
    "plain_native_cpu": Kept(bits=16),
    # activation_scaling_factor, and output_scaling_factor or weights_scaling_factor
    "fp8_dense": Kept(wide=True, per_layer=2 * FLOAT32_BYTES),
    "fp8_native_cpu": Kept(bits=8, per_layer=2 * FLOAT32_BYTES),
    "fp8_codes_cuda": Kept(bits=8, per_layer=2 * FLOAT32_BYTES),
    "fp8_scaled_mm": Kept(bits=8, per_layer=2 * FLOAT32_BYTES),
    # per_channel_scale
    "fp8_rowwise_dense": Kept(wide=True, per_output=FLOAT32_BYTES),
    "fp8_rowwise_native_cpu": Kept(bits=8, per_output=FLOAT32_BYTES),
    "fp8_rowwise_codes_cuda": Kept(bits=8, per_output=FLOAT32_BYTES),
    # prequant_scaling_factor; packed also scales, for the CPU with zeros
    "int4_dense": Kept(per_input_elements=1),
    # a float32 scale for each group
    "int4_coded_cpu": Kept(bits=4, per_group_bytes=FLOAT32_BYTES, per_input_elements=1),
    "int4_native_cpu": Kept(bits=4, per_group_bytes=FLOAT32_BYTES, per_input_elements=1),
    "int4_packed_cpu": Kept(bits=4, per_group=2, per_input_elements=1),
    "int4_packed_cuda": Kept(bits=4, per_group=1, per_input_elements=1),
    "int8_dense": Kept(),
    "int8_native_cpu": Kept(bits=8, per_output=FLOAT32_BYTES),
    "int8_codes_cuda": Kept(bits=8, per_output=FLOAT32_BYTES),
    # prequant_scaling_factor and output_scaling_factor in float32, activation_scaling_factor
    "int8_sq_dense": Kept(wide=True, per_input=FLOAT32_BYTES, per_output=FLOAT32_BYTES, per_layer=FLOAT32_BYTES),
    "int8_sq_cpu": Kept(bits=8, per_input=FLOAT32_BYTES, per_output=FLOAT32_BYTES, per_layer=FLOAT32_BYTES),
    "int8_sq_codes_cuda": Kept(bits=8, per_input=FLOAT32_BYTES, per_output=FLOAT32_BYTES, per_layer=FLOAT32_BYTES),
    # activation_scaling_factor and output_scaling_factor
    "nvfp4_dense": Kept(wide=True, per_layer=2 * FLOAT32_BYTES),
    "nvfp4_native_cpu": Kept(bits=4, per_block_bytes=FLOAT32_BYTES, per_layer=2 * FLOAT32_BYTES),
    "nvfp4_packed_cuda": Kept(bits=4, per_block_bytes=1, per_layer=2 * FLOAT32_BYTES),
    # input_scaling_factor in float32, output_scaling_factor
    "w4a8_dense": Kept(wide=True, per_input=FLOAT32_BYTES, per_layer=FLOAT32_BYTES),
    "w4a8_native_cpu": Kept(bits=4, per_group_bytes=FLOAT32_BYTES, per_input=FLOAT32_BYTES, per_layer=FLOAT32_BYTES),
    "w4a8_packed_cuda": Kept(bits=4, per_group_bytes=FLOAT32_BYTES, per_input=FLOAT32_BYTES, per_layer=FLOAT32_BYTES),
    "w4a8_packed_cpu": Kept(bits=4, per_group=2, per_input=FLOAT32_BYTES, per_layer=FLOAT32_BYTES),
}
"""The memory of each kernel's packed weights (`pack` in runtime/linears), which a test compares."""
