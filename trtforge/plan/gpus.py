"""NVIDIA GPUs by name: compute capability, memory, and peak rates.

Rates are those of NVIDIA's datasheets, dense (where a sheet gives FLOP/s with sparsity, half of it). Each row names its
sheet. Memory is what CUDA reports, as in logs and out-of-memory messages, not the nominal size.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from trtforge.core.errors import ForgeError, Repair
from trtforge.formats.trtllm import Quantization
from trtforge.plan.formats import BY_ALGORITHM, CACHE_BY_ALGORITHM, CacheFormat, Compute, WeightFormat

GPUS_PER_SERVER = 8
"""The most GPUs of a server, except where NVLink connects more."""


@dataclass(frozen=True)
class Links:
    """Links between the GPUs of a server: bytes/s per GPU and direction. NVLink connects `nvlink_gpus` of them."""

    pcie: float
    nvlink: float = 0
    nvlink_gpus: int = 1

    def among(self, gpus: int) -> float:
        """Bytes/s between the ranks of a tensor-parallel group."""
        return self.nvlink if gpus <= self.nvlink_gpus else self.pcie


@dataclass(frozen=True)
class Gpu:
    """One product. `sm` is compute capability x 10, `memory` the bytes that CUDA reports, `bandwidth` memory bytes/s.

    `float16`, `int8`, `fp8`, `fp4`: dense FLOP/s (OP/s) of the tensor cores with float32 (int32) accumulation; 0 if
    unsupported.
    """

    name: str
    sm: int
    memory: float
    bandwidth: float
    links: Links
    float16: float
    int8: float = 0
    fp8: float = 0
    fp4: float = 0

    @property
    def capability(self) -> str:
        """Compute capability as NVIDIA writes it."""
        return f"{self.sm // 10}.{self.sm % 10}"

    def rate(self, compute: Compute) -> float:
        """FLOP/s of a compute type; float16's for a type that the tensor cores lack."""
        rates: dict[Compute, float] = {
            "float16": self.float16, "int8": self.int8, "fp8": self.fp8, "fp4": self.fp4,
        }  # fmt: skip
        return rates[compute] or self.float16


_GIB = 1 << 30
_T, _G = 1e12, 1e9
_PCIE_3, _PCIE_4, _PCIE_5 = Links(16 * _G), Links(32 * _G), Links(64 * _G)  # x16
_V100 = Links(16 * _G, 150 * _G, 8)
_A100 = Links(32 * _G, 300 * _G, 8)
_BRIDGE_A30 = Links(32 * _G, 100 * _G, 2)
_BRIDGE_A40 = Links(32 * _G, 56.25 * _G, 2)
_H100 = Links(64 * _G, 450 * _G, 8)
_BRIDGE_H100 = Links(64 * _G, 300 * _G, 2)
_B200 = Links(64 * _G, 900 * _G, 8)
_NVL72 = Links(64 * _G, 900 * _G, 72)
GPUS = (
    # NVIDIA V100 Tensor Core GPU datasheet, Jan 2020 (SXM2): 125 TFLOPS, 900 GB/s, NVLink 300 GB/s
    Gpu("v100-16gb", 70, 15.7 * _GIB, 900 * _G, _V100, 125 * _T),
    Gpu("v100-32gb", 70, 31.7 * _GIB, 900 * _G, _V100, 125 * _T),
    # NVIDIA T4 datasheet, Mar 2019: 65 TFLOPS, 130 TOPS, 320 GB/s
    Gpu("t4", 75, 14.6 * _GIB, 320 * _G, _PCIE_3, 65 * _T, 130 * _T),
    # NVIDIA A100 datasheet, May 2020 and Jun 2021 (SXM): 312 TFLOPS, 624 TOPS, 1,555 and 2,039 GB/s, NVLink 600 GB/s
    Gpu("a100-40gb", 80, 39.4 * _GIB, 1555 * _G, _A100, 312 * _T, 624 * _T),
    Gpu("a100-80gb", 80, 79.1 * _GIB, 2039 * _G, _A100, 312 * _T, 624 * _T),
    # NVIDIA A30 datasheet, Mar 2022: 165 TFLOPS, 330 TOPS, 933 GB/s, NVLink 200 GB/s
    Gpu("a30", 80, 23.5 * _GIB, 933 * _G, _BRIDGE_A30, 165 * _T, 330 * _T),
    # NVIDIA A10 datasheet, Mar 2022: 125 TFLOPS, 250 TOPS, 600 GB/s; the A10G of AWS: 70 TFLOPS, 140 TOPS
    Gpu("a10", 86, 22.0 * _GIB, 600 * _G, _PCIE_4, 125 * _T, 250 * _T),
    Gpu("a10g", 86, 22.0 * _GIB, 600 * _G, _PCIE_4, 70 * _T, 140 * _T),
    # NVIDIA A40 datasheet, Apr 2022: 149.7 TFLOPS, 299.3 TOPS, 696 GB/s, NVLink 112.5 GB/s
    Gpu("a40", 86, 44.3 * _GIB, 696 * _G, _BRIDGE_A40, 149.7 * _T, 299.3 * _T),
    # NVIDIA RTX A6000 datasheet, 2021: 309.7 TFLOPS sparse, 768 GB/s, NVLink 112.5 GB/s
    Gpu("rtx-a6000", 86, 47.5 * _GIB, 768 * _G, _BRIDGE_A40, 154.8 * _T, 309.7 * _T),
    # NVIDIA Ampere GA102 whitepaper, table 9 (FP16 with FP32 accumulate): 71 TFLOPS, 284 TOPS, 936 GB/s
    Gpu("rtx-3090", 86, 23.6 * _GIB, 936 * _G, _BRIDGE_A40, 71 * _T, 284 * _T),
    # NVIDIA L4 datasheet, Mar 2023: 242 TFLOPS sparse, 485 FP8 and INT8 sparse, 300 GB/s
    Gpu("l4", 89, 22.0 * _GIB, 300 * _G, _PCIE_4, 121 * _T, 242.5 * _T, 242.5 * _T),
    # NVIDIA L40 and L40S datasheets, 2023: 181.05 and 362.05 TFLOPS, FP8 362 and 733, INT8 likewise, 864 GB/s
    Gpu("l40", 89, 44.3 * _GIB, 864 * _G, _PCIE_4, 181.05 * _T, 362 * _T, 362 * _T),
    Gpu("l40s", 89, 44.4 * _GIB, 864 * _G, _PCIE_4, 362.05 * _T, 733 * _T, 733 * _T),
    # NVIDIA Ada GPU Architecture whitepaper, appendix A (FP32 accumulate): 165.2 TFLOPS, FP8 330.3, INT8 660.6,
    # 1,008 GB/s
    Gpu("rtx-4090", 89, 23.6 * _GIB, 1008 * _G, _PCIE_4, 165.2 * _T, 660.6 * _T, 330.3 * _T),
    # NVIDIA L20 product brief, 2023: 119.5 TFLOPS, FP8 and INT8 239, 864 GB/s
    Gpu("l20", 89, 44.5 * _GIB, 864 * _G, _PCIE_4, 119.5 * _T, 239 * _T, 239 * _T),
    # NVIDIA RTX 6000 Ada datasheet, 2023: 1,457 TFLOPS FP8 sparse, 960 GB/s
    Gpu("rtx-6000-ada", 89, 47.4 * _GIB, 960 * _G, _PCIE_4, 364.2 * _T, 728.5 * _T, 728.5 * _T),
    # NVIDIA H100 datasheet, 2024: SXM 1,979 TFLOPS sparse, FP8 and INT8 3,958, 3.35 TB/s, NVLink 900 GB/s;
    # NVL 1,671 and 3,341, 3.9 TB/s, NVLink 600 GB/s; PCIe (2022): 1,513 and 3,026, 2 TB/s, NVLink 600 GB/s
    Gpu("h100-80gb", 90, 79.1 * _GIB, 3350 * _G, _H100, 989.5 * _T, 1979 * _T, 1979 * _T),
    Gpu("h100-nvl", 90, 93.1 * _GIB, 3900 * _G, _BRIDGE_H100, 835.5 * _T, 1670.5 * _T, 1670.5 * _T),
    Gpu("h100-pcie", 90, 79.1 * _GIB, 2000 * _G, _BRIDGE_H100, 756.5 * _T, 1513 * _T, 1513 * _T),
    # NVIDIA H200 datasheet, 2024 (SXM): FLOP/s of the H100 SXM, 4.8 TB/s, NVLink 900 GB/s
    Gpu("h200", 90, 139.8 * _GIB, 4800 * _G, _H100, 989.5 * _T, 1979 * _T, 1979 * _T),
    # NVIDIA H20 product brief, 2023: 148 TFLOPS, FP8 and INT8 296, 96 GB, 4 TB/s, NVLink 900 GB/s
    Gpu("h20", 90, 95.1 * _GIB, 4000 * _G, _H100, 148 * _T, 296 * _T, 296 * _T),
    # NVIDIA GH200 Grace Hopper datasheet, 2023: 96 GB HBM3, up to 4 TB/s, or 144 GB HBM3e, up to 4.9 TB/s, FLOP/s of
    # the H100 SXM
    Gpu("gh200-96gb", 90, 94.5 * _GIB, 4000 * _G, _PCIE_5, 989.5 * _T, 1979 * _T, 1979 * _T),
    Gpu("gh200-144gb", 90, 140.0 * _GIB, 4900 * _G, _PCIE_5, 989.5 * _T, 1979 * _T, 1979 * _T),
    # NVIDIA DGX B200 datasheet, 2024, an eighth: FP8 72 and FP4 144 PFLOPS sparse, 64 TB/s, NVLink 14.4 TB/s
    Gpu("b200", 100, 178.3 * _GIB, 8000 * _G, _B200, 2250 * _T, 4500 * _T, 4500 * _T, 9000 * _T),
    # NVIDIA GB200 NVL72 datasheet, 2024, a 72nd: FP8 720 and FP4 1,440 PFLOPS sparse, 576 TB/s, NVLink 130 TB/s
    Gpu("gb200", 100, 184.0 * _GIB, 8000 * _G, _NVL72, 2500 * _T, 5000 * _T, 5000 * _T, 10000 * _T),
    # NVIDIA DGX B300 and HGX B300 datasheets, 2025, an eighth: FP4 108 PFLOPS dense, FP8 72 sparse, 64 TB/s, NVLink
    # 14.4 TB/s; INT8 as GB300, whose sheet has it
    Gpu("b300", 103, 268.0 * _GIB, 8000 * _G, _B200, 2250 * _T, 165 * _T, 4500 * _T, 13500 * _T),
    # NVIDIA GB300 NVL72 datasheet, 2025, a 72nd: FP4 1,080 PFLOPS dense, FP8 720 sparse, INT8 24 POPS sparse, 576 TB/s,
    # NVLink 130 TB/s
    Gpu("gb300", 103, 276.0 * _GIB, 8000 * _G, _NVL72, 2500 * _T, 165 * _T, 5000 * _T, 15000 * _T),
    # NVIDIA DGX Spark datasheet, 2025: FP4 1 PFLOPS sparse, 128 GB shared with the CPU, 273 GB/s; the other rates by
    # the ratios of Blackwell
    Gpu("gb10", 121, 119.6 * _GIB, 273 * _G, _PCIE_5, 125 * _T, 250 * _T, 250 * _T, 500 * _T),
    # NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet, 2025: FP4 4 and FP8 2 PFLOPS sparse, 1,597 GB/s
    Gpu("rtx-pro-6000", 120, 94.9 * _GIB, 1597 * _G, _PCIE_5, 500 * _T, 1000 * _T, 1000 * _T, 2000 * _T),
    # NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A (FP32 accumulate): 209.5 TFLOPS, FP8 419, INT8 838,
    # FP4 1,676, 1,792 GB/s
    Gpu("rtx-5090", 120, 31.3 * _GIB, 1792 * _G, _PCIE_5, 209.5 * _T, 838 * _T, 419 * _T, 1676 * _T),
)
_BY_NAME = {gpu.name: gpu for gpu in GPUS}
ALIASES = {
    "v100": "v100-16gb",
    "a100": "a100-80gb",
    "h100": "h100-80gb",
    "h100-sxm": "h100-80gb",
    "gh200": "gh200-96gb",
    "a6000": "rtx-a6000",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
}
"""Short names of the usual variants."""


def gpu_named(name: str) -> Gpu:
    """A GPU by name or alias, in upper or lower case, with hyphens or spaces. Raises ForgeError with the nearest known
    one."""
    plain = re.sub(r"[\s_]+", "-", name.strip().lower()).removeprefix("nvidia-").removeprefix("geforce-")
    found = _BY_NAME.get(ALIASES.get(plain, plain))
    if found is not None:
        return found
    first = plain.partition("-")[0]
    like = [known for known in _BY_NAME if known.startswith((plain, f"{first}-"))] if plain else []
    nearest = like or get_close_matches(plain, _BY_NAME, n=1, cutoff=0.4)
    known = f"Known: {', '.join(_BY_NAME)}."
    error = ForgeError(f"GPU {name} is not known", hint=f"Did you mean {nearest[0]}? {known}" if nearest else known)
    raise error.repaired_by(Repair(name, nearest[0]) if nearest else None)


def product_of(driver_name: str, memory: float) -> Gpu | None:
    """The product with this driver name and `memory` bytes; None if it is not in the table.

    Variants of a product (H100 PCIe, H100 NVL) differ by a word of the name, or by memory.
    """
    words = set(re.split(r"[ -]", driver_name.lower()))
    like = [gpu for gpu in GPUS if _words(gpu) <= words and abs(gpu.memory - memory) < _MEMORY_VARIES * gpu.memory]
    return max(like, key=lambda gpu: len(_words(gpu)), default=None)


_MEMORY_VARIES = 0.08
"""Tolerance of the reported memory: ECC and the driver reserve a part."""


def _words(gpu: Gpu) -> frozenset[str]:
    return frozenset(word for word in gpu.name.split("-") if not re.fullmatch(r"\d+gb", word))


def refusal(gpu: Gpu, format: WeightFormat | CacheFormat) -> str | None:
    """Why TensorRT-LLM does not run a format of weights or KV cache on this GPU; None if it does."""
    if format.runs_on(gpu.sm):
        return None
    has = f"{gpu.name} has compute capability {gpu.capability}"
    if gpu.sm in format.sm:
        return f"{has}: TensorRT-LLM refuses {format.algorithm} there"
    what = "an FP8 KV cache" if isinstance(format, CacheFormat) else format.name
    return f"{has}: {what} needs {format.sm.start // 10}.{format.sm.start % 10} ({_SINCE[format.sm.start]} or later)"


_SINCE = {89: "Ada, Hopper", 100: "Blackwell"}


def require_formats(gpu: Gpu, quantization: Quantization) -> None:
    """Raises ForgeError if TensorRT-LLM cannot run the checkpoint's number formats on this GPU."""
    layers = quantization.quantized_layers or {}
    mixed = sorted({layer.quant_algo for layer in layers.values()})
    algorithms: list[str | None] = [*mixed] or [quantization.quant_algo]
    for format in (
        *(BY_ALGORITHM.get(algorithm) for algorithm in algorithms),
        CACHE_BY_ALGORITHM.get(quantization.kv_cache_quant_algo),
    ):
        if format is not None and (why := refusal(gpu, format)) is not None:
            raise ForgeError(why, hint=_way_out(gpu, format))


_BLOCK_SCALES_SM = (90, 100, 103)
_LLM_API_BLOCK = (128, 128)


def require_block_scales(gpu: Gpu, block: tuple[int, int]) -> None:
    """Raises ForgeError if the LLM API cannot run FP8 with block scales on this GPU.

    Source: the hardware matrix in docs/source/features/quantization.md, and `load_hf_quant_config` in
    _torch/model_config.py (TensorRT-LLM 1.2).
    """
    way_out = "Convert it with --quant fp8 and a calibration: it is read as bfloat16."
    if block != _LLM_API_BLOCK:
        raise ForgeError(f"FP8 blocks of {block[0]} x {block[1]}: the LLM API has only 128 x 128", hint=way_out)
    if gpu.sm not in _BLOCK_SCALES_SM:
        raise ForgeError(
            f"{gpu.name}: TensorRT-LLM has no FP8 with block scales on compute capability {gpu.capability}",
            hint=way_out,
        )


_MXFP4_SM = 90


def require_mxfp4(gpu: Gpu) -> None:
    """Raises ForgeError if the LLM API cannot run MXFP4 experts on this GPU: Hopper and later can.

    Source: `get_mxfp4_quant_algo` and `resolve_moe_backend` in _torch/model_config.py (TensorRT-LLM 1.2).
    """
    if gpu.sm < _MXFP4_SM:
        raise ForgeError(
            f"{gpu.name}: TensorRT-LLM has no MXFP4 on compute capability {gpu.capability}, only from 9.0 on",
            hint="Use another GPU, such as h100-80gb.",
        )


def _way_out(gpu: Gpu, format: WeightFormat | CacheFormat) -> str:
    if gpu.sm in format.sm:
        return "Use fp8 on this GPU."
    if format.sm.start == 100:
        return "Use fp8, or a GPU such as b200."
    return "Use int4_awq without an FP8 KV cache, or another GPU such as l40s or h100-80gb."
