"""Checkpoint configurations to compile: Llama 3 8B in the formats that matter."""

from typing import Any

from trtforge.core.parallel import Parallel
from trtforge.core.recipe import EngineConfig
from trtforge.formats.trtllm import CheckpointConfig

LLAMA: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_size": 128,
    "intermediate_size": 14336,
    "hidden_act": "silu",
    "position_embedding_type": "rope_gpt_neox",
    "max_position_embeddings": 8192,
    "mapping": Parallel().mapping(),
}


def llama(quant_algo: str | None = None, kv_cache: str | None = None, **changes: Any) -> CheckpointConfig:
    quantization = {"quant_algo": quant_algo, "kv_cache_quant_algo": kv_cache}
    return CheckpointConfig.model_validate({**LLAMA, "quantization": quantization, **changes})


def engine(**values: Any) -> EngineConfig:
    return EngineConfig.parse(values, "engine")


def drafting(
    method: str, quant_algo: str | None = None, kv_cache: str | None = None, dtype: str = "float16", **changes: Any
) -> CheckpointConfig:
    """A checkpoint that holds Medusa heads or an EAGLE network, as TensorRT-LLM's own converters write it."""
    heads = {
        "medusa": {"architecture": "MedusaForCausalLM", "num_medusa_heads": 4, "num_medusa_layers": 1},
        "eagle": {"architecture": "EagleForCausalLM", "num_eagle_layers": 4, "max_non_leaves_per_layer": 10},
    }
    return llama(quant_algo, kv_cache, **{"dtype": dtype, "max_draft_len": 63, **heads[method], **changes})
