"""The description of a checkpoint or an engine that `trtforge cache list` shows."""

from trtforge.core.cache_entry import About
from trtforge.formats.trtllm import CheckpointConfig


def about_checkpoint(model: CheckpointConfig, release: str | None = None) -> About:
    """The description of a checkpoint, or of its engine for a `release`, such as TensorRT-LLM 1.2.1, or torch."""
    return About(
        architecture=model.architecture,
        layers=model.num_hidden_layers,
        hidden=model.hidden_size,
        format=model.quantization.quant_algo or model.dtype,
        kv_cache=model.quantization.kv_cache_quant_algo,
        release=release,
    )
