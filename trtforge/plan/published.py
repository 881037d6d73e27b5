"""Models with weights quantised by their publisher, which trtforge passes to the LLM API unchanged.

FP8 with block scales (TensorRT-LLM's FP8_BLOCK_SCALES): quantising again with one scale per tensor would only lose
accuracy. GPT-OSS keeps its experts in MXFP4. Source of both: `load_hf_quant_config` in _torch/model_config.py (1.2).
"""

from collections.abc import Iterator

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfConfig
from trtforge.formats.quantization_config import quantization_method
from trtforge.plan.formats import WEIGHTS, WeightFormat
from trtforge.plan.gpus import Gpu, require_block_scales, require_mxfp4
from trtforge.plan.legality import Problem

_MXFP4 = WeightFormat("none", 4, "float16", loss=0, per_group=1, grouped=True, group_size=32)
"""E2M1 experts with a power of two (E8M0) for each 32 weights; TensorRT-LLM's padding is not counted."""


def served_as_published(config: HfConfig, backend: str, quant: str) -> bool:
    """Whether a build with this backend and format uses the checkpoint unchanged, without stages before compile."""
    if config.mxfp4_experts:
        return backend == "llmapi" and quant == "none"
    return backend == "llmapi" and quant == "fp8" and config.fp8_blocks is not None


def published_format(config: HfConfig) -> str:
    """The published format: "fp8", "mxfp4", or the dtype of unquantised weights."""
    method = quantization_method(config)
    return config.dtype if method == "none" else method


def weight_format(config: HfConfig, backend: str, quant: str) -> WeightFormat:
    """How the quantised weights of a model are stored if it is served in the format `quant`."""
    return _MXFP4 if config.mxfp4_experts and served_as_published(config, backend, quant) else WEIGHTS[quant]


def published_problems(config: HfConfig, gpu: Gpu | None, exclude_modules: tuple[str, ...]) -> Iterator[Problem]:
    """Reasons not to serve a checkpoint without converting it."""
    try:
        require_published(config, gpu)
    except ForgeError as error:
        yield Problem("gpu_format", error.message, error.hint)
    if exclude_modules:
        message = "exclude_modules has no effect on a checkpoint that is served as published"
        yield Problem("exclude_modules", message, "Leave quantization.exclude_modules out, or use another format.")


def require_published(config: HfConfig, gpu: Gpu | None) -> None:
    """Raises ForgeError if the LLM API cannot run a checkpoint's block-scaled FP8 or MXFP4 on the GPU."""
    if gpu is not None and config.fp8_blocks is not None:
        require_block_scales(gpu, config.fp8_blocks)
    if gpu is not None and quantization_method(config) == "mxfp4":
        require_mxfp4(gpu)
