"""Selects the kernels that compute a rank's linear layers on a device."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from trtforge.core.config_model import Config
from trtforge.core.device import UsableDevice
from trtforge.core.dtypes import ModelDtype
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import QuantFormat
from trtforge.models.kernels import REFERENCE, KernelName, kernel_for, plain_kernel
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.cuda.triton_support import sm_of
from trtforge.runtime.linears.byte_cuda import Fp8Cuda, Fp8RowwiseCuda, Int8Cuda, SmoothQuantCuda
from trtforge.runtime.linears.byte_native import Fp8Native, Fp8RowwiseNative, Int8Native
from trtforge.runtime.linears.fp8_linear import Fp8Dense, Fp8ScaledMatmul
from trtforge.runtime.linears.fp8_rowwise_linear import Fp8RowwiseDense
from trtforge.runtime.linears.int4_linear import Int4Dense, Int4Packed
from trtforge.runtime.linears.int4_native import Int4Native
from trtforge.runtime.linears.int4_tiled import Int4Tiled, W4A8Tiled
from trtforge.runtime.linears.int8 import multiplies_int8
from trtforge.runtime.linears.int8_linear import Int8Dense, SmoothQuant
from trtforge.runtime.linears.linear import Dense, Kernel
from trtforge.runtime.linears.nvfp4_linear import Nvfp4Dense
from trtforge.runtime.linears.nvfp4_native import Nvfp4Native
from trtforge.runtime.linears.nvfp4_tiled import Nvfp4Tiled
from trtforge.runtime.linears.plain_native import PlainNative
from trtforge.runtime.linears.w4a8_linear import W4A8, W4A8Native
from trtforge.runtime.native.bindings import native, native_for

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
KERNELS: Mapping[KernelName, Kernel] = MappingProxyType(
    {
        "dense": Dense(),
        "plain_native_cpu": PlainNative(),
        "fp8_dense": Fp8Dense(),
        "fp8_native_cpu": Fp8Native(),
        "fp8_codes_cuda": Fp8Cuda(),
        "fp8_scaled_mm": Fp8ScaledMatmul(),
        "fp8_rowwise_dense": Fp8RowwiseDense(),
        "fp8_rowwise_native_cpu": Fp8RowwiseNative(),
        "fp8_rowwise_codes_cuda": Fp8RowwiseCuda(),
        "nvfp4_dense": Nvfp4Dense(),
        "nvfp4_native_cpu": Nvfp4Native(),
        "nvfp4_packed_cuda": Nvfp4Tiled(),
        "int8_dense": Int8Dense(),
        "int8_native_cpu": Int8Native(),
        "int8_codes_cuda": Int8Cuda(),
        "int8_sq_dense": SmoothQuant(integer=False),
        "int8_sq_cpu": SmoothQuant(integer=True),
        "int8_sq_codes_cuda": SmoothQuantCuda(),
        "w4a8_dense": W4A8(Int4Dense()),
        "w4a8_native_cpu": W4A8Native(),
        "w4a8_packed_cpu": W4A8(Int4Packed()),
        "w4a8_packed_cuda": W4A8Tiled(),
        "int4_dense": Int4Dense(),
        "int4_coded_cpu": Int4Native(rounds=True),
        "int4_native_cpu": Int4Native(),
        "int4_packed_cpu": Int4Packed(),
        "int4_packed_cuda": Int4Tiled(),
    }
)
"""The kernel of each name."""
_CPU_PACKED: frozenset[KernelName] = frozenset({"int4_packed_cpu", "w4a8_packed_cpu"})
"""Kernels whose packed layout depends on the CPU's instruction set."""


class Kernels(Config):
    """The `kernels` object of an engine's config.json: how its quantised linear layers are computed.

    `quantized`: the kernel of quantised layers. `cpu_capability` is set if the packed layout depends on the CPU's
    instruction set. `fp8`: with mixed precision, the kernel of FP8 layers. `plain`: the kernel of unquantised layers.
    """

    quantized: KernelName = "dense"
    cpu_capability: str | None = None
    fp8: KernelName | None = None
    plain: KernelName = "dense"

    def dumped(self) -> dict[str, Any]:
        """As JSON, without `fp8` and `plain` if they have their defaults."""
        unset = {name for name, default in (("fp8", None), ("plain", "dense")) if getattr(self, name) == default}
        return self.model_dump(mode="json", exclude=unset)

    def check(self) -> None:
        """Raises ForgeError if the weights were packed for another machine and do not work on this one."""
        here = torch.backends.cpu.get_cpu_capability()
        if self.cpu_capability not in (None, here):
            raise ForgeError(
                f"the engine's weights were packed for {self.cpu_capability} CPUs, this one is {here}",
                hint="On this machine, run `trtforge compile CHECKPOINT OUT --backend torch` again.",
            )
        if self.quantized == "int8_sq_cpu" and not multiplies_int8() and native() is None:
            raise ForgeError(
                "INT8 weights need a CPU with INT8 instructions (VNNI) or a C++ compiler, and this machine has neither",
                hint="On this machine, run `trtforge compile CHECKPOINT OUT --backend torch` again.",
            )


def reference_kernels(algorithm: QuantFormat, *, mixed: bool = False) -> Kernels:
    """Kernels of plain arithmetic for any device and compute type, used to verify checkpoints."""
    return Kernels(quantized=REFERENCE[algorithm], fp8=REFERENCE["fp8"] if mixed else None)


def choose_kernels(
    algorithm: QuantFormat,
    group_size: int,
    device: UsableDevice,
    dtype: ModelDtype,
    *,
    mixed: bool = False,
    checkpoint: ModelDtype = "float32",
    int8_activations: bool = False,
) -> Kernels:
    """The fastest kernels for a device. `checkpoint`: dtype of the checkpoint's unquantised weights;
    `int8_activations`: INT4 layers may round activations to INT8."""
    name = _fastest(algorithm, group_size, device, dtype, int8_activations=int8_activations)
    capability = torch.backends.cpu.get_cpu_capability() if name in _CPU_PACKED else None
    fp8 = _fastest("fp8", group_size, device, dtype) if mixed else None
    plain = plain_kernel(checkpoint, device, dtype, native=native_for(torch.device(device), DTYPES[dtype]) is not None)
    return Kernels(quantized=name, cpu_capability=capability, fp8=fp8, plain=plain)


def _fastest(
    algorithm: QuantFormat, group_size: int, device: UsableDevice, dtype: ModelDtype, *, int8_activations: bool = False
) -> KernelName:
    kernels = native_for(torch.device(device), DTYPES[dtype])
    return kernel_for(
        algorithm,
        group_size,
        device,
        dtype,
        vnni=multiplies_int8(),
        native=kernels is not None,
        sm=sm_of(torch.cuda.current_device()) if device == "cuda" and torch.cuda.is_available() else 0,
        int8_activations=int8_activations,
    )


def kernel_of(spec: DecoderSpec, kernels: Kernels, module: str) -> Kernel:
    """The kernel of one linear layer, by its name in the checkpoint."""
    if not spec.quantized(module):
        return KERNELS[kernels.plain]
    return KERNELS[kernels.fp8 if kernels.fp8 and spec.format_of(module) == "fp8" else kernels.quantized]
