"""This machine's CPU, read without torch: its name, and the instruction sets relevant to plans and engines."""

import re
from dataclasses import dataclass

from trtforge.core.device import UsableDevice
from trtforge.core.dtypes import ModelDtype
from trtforge.core.recipe import DtypeChoice
from trtforge.machine.compiler import find_compiler
from trtforge.machine.host import Host


@dataclass(frozen=True)
class Processor:
    """`bfloat16`: native bfloat16 products (AVX512-BF16 or AMX). `vnni`: int8 dot products (AVX512-VNNI).

    `kernels`: trtforge's own kernels can be compiled for it.
    """

    bfloat16: bool
    vnni: bool
    kernels: bool = False

    @classmethod
    def of(cls, host: Host) -> "Processor":
        """The processor of `host`, without any instruction set if /proc/cpuinfo cannot be read."""
        flags = read_instruction_sets(host)
        return cls(
            bfloat16=not flags.isdisjoint(("avx512_bf16", "amx_bf16")),
            vnni="avx512_vnni" in flags,
            kernels=find_compiler(host) is not None,
        )


def read_instruction_sets(host: Host) -> frozenset[str]:
    """The processor's features by Linux's names; empty if /proc/cpuinfo cannot be read."""
    match = re.search(r"^(?:flags|Features)\s*: (.*)$", host.text("proc/cpuinfo") or "", flags=re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def processor_name(host: Host) -> str | None:
    """The processor's name, such as AMD EPYC 9B14; None if /proc/cpuinfo does not have it."""
    match = re.search(r"^model name\s*: (.+)$", host.text("proc/cpuinfo") or "", flags=re.MULTILINE)
    return match[1].strip() if match else None


def compute_dtype(
    requested: DtypeChoice, model_dtype: ModelDtype, device: UsableDevice, processor: Processor
) -> ModelDtype:
    """The embedded engine's compute dtype.

    `auto`: the checkpoint's on CUDA; on a CPU float32, unless both checkpoint and CPU have bfloat16.
    """
    if requested != "auto":
        return requested
    if device == "cuda":
        return model_dtype
    return "bfloat16" if model_dtype == "bfloat16" and processor.bfloat16 else "float32"
