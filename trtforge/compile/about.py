"""The description of an engine in the cache."""

from trtforge.core.cache_entry import About
from trtforge.formats.trtllm import CheckpointConfig


def about_engine(model: CheckpointConfig, release: str) -> About:
    """The description of a checkpoint's engine. `release`: its target, such as TensorRT-LLM 1.2.1, or torch."""
    return About(
        architecture=model.architecture,
        layers=model.num_hidden_layers,
        hidden=model.hidden_size,
        format=model.quantization.quant_algo or model.dtype,
        kv_cache=model.quantization.kv_cache_quant_algo,
        release=release,
    )
