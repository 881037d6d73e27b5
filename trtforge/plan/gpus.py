"""NVIDIA GPUs by name: compute capability and memory, and which number formats TensorRT-LLM runs on them.

Rules: FP8 needs compute capability 8.9 (TensorRT-LLM issues #1428, #4599); TensorRT-LLM refuses INT4 and INT8
weights on 10.0 to 11.9 (quantization/functional.py, `preprocess_weights_for_mixed_gemm`, 1.x).
"""

from dataclasses import dataclass
from difflib import get_close_matches

from trtforge.core.errors import ForgeError
from trtforge.formats.trtllm import Quantization


@dataclass(frozen=True)
class Gpu:
    """One product. `sm` is compute capability times ten, `memory` in bytes."""

    name: str
    sm: int
    memory: int


_GIB = 1 << 30
GPUS = (
    Gpu("v100-16gb", 70, 16 * _GIB),
    Gpu("v100-32gb", 70, 32 * _GIB),
    Gpu("t4", 75, 16 * _GIB),
    Gpu("a100-40gb", 80, 40 * _GIB),
    Gpu("a100-80gb", 80, 80 * _GIB),
    Gpu("a30", 80, 24 * _GIB),
    Gpu("a10", 86, 24 * _GIB),
    Gpu("a10g", 86, 24 * _GIB),
    Gpu("a40", 86, 48 * _GIB),
    Gpu("rtx-a6000", 86, 48 * _GIB),
    Gpu("rtx-3090", 86, 24 * _GIB),
    Gpu("l4", 89, 24 * _GIB),
    Gpu("l40", 89, 48 * _GIB),
    Gpu("l40s", 89, 48 * _GIB),
    Gpu("rtx-4090", 89, 24 * _GIB),
    Gpu("rtx-6000-ada", 89, 48 * _GIB),
    Gpu("h100-80gb", 90, 80 * _GIB),
    Gpu("h100-nvl", 90, 94 * _GIB),
    Gpu("h200", 90, 141 * _GIB),
    Gpu("gh200-96gb", 90, 96 * _GIB),
    Gpu("b200", 100, 180 * _GIB),
    Gpu("gb200", 100, 186 * _GIB),
    Gpu("rtx-5090", 120, 32 * _GIB),
)
_BY_NAME = {gpu.name: gpu for gpu in GPUS}


def gpu_named(name: str) -> Gpu:
    """A GPU by name. Raises ForgeError with the nearest known one."""
    try:
        return _BY_NAME[name.lower()]
    except KeyError:
        longer = [known for known in _BY_NAME if known.startswith(name.lower())]
        nearest = longer or get_close_matches(name.lower(), _BY_NAME, n=1, cutoff=0.4)
        known = f"Known: {', '.join(_BY_NAME)}."
        raise ForgeError(
            f"GPU {name} is not known", hint=f"Did you mean {nearest[0]}? {known}" if nearest else known
        ) from None


def require_formats(gpu: Gpu, quantization: Quantization) -> None:
    """Raises ForgeError if TensorRT-LLM cannot run the checkpoint's number formats on this GPU."""
    algorithm, cache = quantization.quant_algo or "", quantization.kv_cache_quant_algo or ""
    capability = f"compute capability {gpu.sm // 10}.{gpu.sm % 10}"
    if "FP8" in (algorithm, cache) and gpu.sm < 89:
        raise ForgeError(
            f"{gpu.name} has {capability}: FP8 needs 8.9 (Ada, Hopper or later)",
            hint="Use int4_awq without an FP8 KV cache, or another GPU such as l40s or h100-80gb.",
        )
    if algorithm.startswith(("W4A16", "W8A8", "W8A16")) and 100 <= gpu.sm < 120:
        raise ForgeError(
            f"{gpu.name} has {capability}: TensorRT-LLM refuses {algorithm} there", hint="Use fp8 on this GPU."
        )
