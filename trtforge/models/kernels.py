"""Which kernel of the embedded engine computes a linear layer of a format, and what it keeps of the weights.

The kernels themselves are in the runtime: this is what is known of them without torch.
"""

from dataclasses import dataclass
from typing import Literal

from trtforge.core.device import UsableDevice
from trtforge.core.dtypes import ModelDtype, dtype_named
from trtforge.core.recipe import QuantFormat

KernelName = Literal[
    "dense",
    "fp8_dense",
    "fp8_scaled_mm",
    "fp8_rowwise_dense",
    "int4_dense",
    "int4_packed_cpu",
    "int4_packed_cuda",
    "int8_dense",
    "int8_sq_dense",
    "int8_sq_cpu",
    "nvfp4_dense",
    "w4a8_dense",
    "w4a8_packed_cpu",
]

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
"""Plain arithmetic on any device and in any compute type."""

PACKED_GROUPS = (256, 128, 64, 32)
"""Group sizes that torch's int4 kernels compute."""


def kernel_for(
    format: QuantFormat, group_size: int, device: UsableDevice, dtype: ModelDtype, *, vnni: bool, fp8_cores: bool
) -> KernelName:
    """The fastest kernel. `vnni`: of the CPU; `fp8_cores`: whether the GPU's tensor cores multiply FP8 (SM 8.9)."""
    packs = dtype == "bfloat16" and (format == "int4_wo" or group_size in PACKED_GROUPS)
    match format, device:
        case "fp8", "cuda" if fp8_cores:
            return "fp8_scaled_mm"
        case "int4_awq" | "int4_wo", "cuda" if packs:
            return "int4_packed_cuda"
        case "int4_awq" | "int4_wo", "cpu" if packs:
            return "int4_packed_cpu"
        case "w4a8_awq", "cpu" if packs:
            return "w4a8_packed_cpu"
        case "int8_sq", "cpu" if vnni:
            return "int8_sq_cpu"
        case _:
            return REFERENCE[format]


@dataclass(frozen=True)
class Kept:
    """What a kernel keeps of a layer (out, in), its bias apart.

    `bits` of a weight, None for the compute type; `wide`: that is float32 where the compute type is float16. In bytes:
    `per_layer`, `per_output`, `per_input`. In elements of the compute type: `per_group`, for each output, and
    `per_input_elements`.
    """

    bits: int | None = None
    wide: bool = False
    per_layer: int = 0
    per_output: int = 0
    per_input: int = 0
    per_group: int = 0
    per_input_elements: int = 0

    def nbytes(self, out: int, inputs: int, dtype: ModelDtype, group_size: int, *, prescaled: bool) -> int:
        """Bytes of one layer. `prescaled`: whether the format multiplies inputs by a vector first."""
        size = dtype_named(dtype).size
        value = dtype_named("float32").size if self.wide and dtype == "float16" else size
        weight = out * inputs * value if self.bits is None else -(-out * inputs * self.bits // 8)
        groups = out * (inputs // group_size) * self.per_group * size
        vectors = self.per_output * out + self.per_input * inputs
        prescale = self.per_input_elements * inputs * size if prescaled else 0
        return weight + groups + vectors + prescale + self.per_layer


_SCALE = 4  # bytes of a float32 scale

KEPT: dict[KernelName, Kept] = {
    "dense": Kept(),
    # activation_scaling_factor, and output_scaling_factor or weights_scaling_factor
    "fp8_dense": Kept(per_layer=2 * _SCALE),
    "fp8_scaled_mm": Kept(bits=8, per_layer=2 * _SCALE),
    # per_channel_scale
    "fp8_rowwise_dense": Kept(wide=True, per_output=_SCALE),
    # prequant_scaling_factor; packed also scales_and_zeros, two for each group
    "int4_dense": Kept(per_input_elements=1),
    "int4_packed_cpu": Kept(bits=4, per_group=2, per_input_elements=1),
    "int4_packed_cuda": Kept(bits=4, per_group=2, per_input_elements=1),
    "int8_dense": Kept(),
    # prequant_scaling_factor and output_scaling_factor in float32, activation_scaling_factor
    "int8_sq_dense": Kept(wide=True, per_input=_SCALE, per_output=_SCALE, per_layer=_SCALE),
    "int8_sq_cpu": Kept(bits=8, per_input=_SCALE, per_output=_SCALE, per_layer=_SCALE),
    # activation_scaling_factor and output_scaling_factor
    "nvfp4_dense": Kept(wide=True, per_layer=2 * _SCALE),
    # input_scaling_factor in float32, output_scaling_factor
    "w4a8_dense": Kept(wide=True, per_input=_SCALE, per_layer=_SCALE),
    "w4a8_packed_cpu": Kept(bits=4, per_group=2, per_input=_SCALE, per_layer=_SCALE),
}
"""As each kernel's `pack` writes it (runtime/*_linear.py); a test holds the two together."""
