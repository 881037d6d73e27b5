"""What this machine's CPU can multiply, read without torch: plans and engines choose types and kernels by it."""

from dataclasses import dataclass
from pathlib import Path

from trtforge.core.device import UsableDevice
from trtforge.core.dtypes import ModelDtype
from trtforge.core.recipe import DtypeChoice


@dataclass(frozen=True)
class Processor:
    """`bfloat16`: products on the CPU's own instructions (AVX512-BF16 or AMX). `vnni`: sums of int8 products."""

    bfloat16: bool
    vnni: bool

    @classmethod
    def here(cls, cpuinfo: Path = Path("/proc/cpuinfo")) -> "Processor":
        """Of this machine; of a CPU that cannot be read, one without either."""
        try:
            lines = cpuinfo.read_text().splitlines()
        except OSError:
            lines = []
        flags = next((line for line in lines if line.startswith("flags")), "").split()
        return cls(bfloat16="avx512_bf16" in flags or "amx_bf16" in flags, vnni="avx512_vnni" in flags)


def compute_dtype(
    requested: DtypeChoice, model_dtype: ModelDtype, device: UsableDevice, processor: Processor
) -> ModelDtype:
    """What the embedded engine computes in. `auto`: the checkpoint's on CUDA; on a CPU float32, unless both checkpoint
    and CPU have bfloat16.
    """
    if requested != "auto":
        return requested
    if device == "cuda":
        return model_dtype
    return "bfloat16" if model_dtype == "bfloat16" and processor.bfloat16 else "float32"
