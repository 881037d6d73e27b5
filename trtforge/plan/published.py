"""Models that the LLM API serves with the weights that their publisher quantised, which trtforge passes through.

These are checkpoints in FP8 with block scales, TensorRT-LLM's FP8_BLOCK_SCALES (`load_hf_quant_config` in
_torch/model_config.py, 1.2). FP8 is what they are: to quantise them again, with one scale a tensor, would only lose.
"""

from collections.abc import Iterator

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfConfig
from trtforge.plan.gpus import Gpu, require_block_scales
from trtforge.plan.legality import Problem


def served_as_published(config: HfConfig, backend: str, quant: str) -> bool:
    """Whether a build with this backend and format takes the checkpoint as it is: no stage before compile runs."""
    return backend == "llmapi" and quant == "fp8" and config.fp8_blocks is not None


def published_problems(config: HfConfig, gpu: Gpu | None, exclude_modules: tuple[str, ...]) -> Iterator[Problem]:
    """What speaks against serving a checkpoint with FP8 block scales as it is."""
    block = config.fp8_blocks
    if gpu is not None and block is not None:
        try:
            require_block_scales(gpu, block)
        except ForgeError as error:
            yield Problem("gpu_format", error.message, error.hint)
    if exclude_modules:
        message = "exclude_modules applies to no checkpoint that is served as it was published"
        yield Problem("exclude_modules", message, "Leave quantization.exclude_modules out, or use another format.")
