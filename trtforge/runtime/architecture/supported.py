"""What the embedded engine computes, and what it refuses with the name of the first thing that it does not."""

from typing import Literal

from trtforge.core.errors import ForgeError
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.runtime.architecture.activations import ACTIVATIONS
from trtforge.runtime.architecture.config_keys import flag
from trtforge.runtime.architecture.network import NETWORKS, Network
from trtforge.runtime.architecture.positions import POSITIONS

Algorithm = Literal["none", "fp8", "fp8_rowwise", "int8_sq", "int8_wo", "int4_awq", "int4_wo", "w4a8_awq", "nvfp4"]
KvFormat = Literal["none", "fp8", "int8"]

ALGORITHMS: dict[str | None, Algorithm] = {
    None: "none",
    "NO_QUANT": "none",
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_rowwise",
    "W8A8_SQ_PER_CHANNEL": "int8_sq",
    "W8A16": "int8_wo",
    "W4A16_AWQ": "int4_awq",
    "W4A16": "int4_wo",
    "W4A8_AWQ": "w4a8_awq",
    "NVFP4": "nvfp4",
}
"""By TensorRT-LLM's quant_algo."""
KV_FORMATS: dict[str | None, KvFormat] = {None: "none", "FP8": "fp8", "INT8": "int8"}
"""By TensorRT-LLM's kv_cache_quant_algo."""


def supported_network(config: CheckpointConfig) -> Network:
    """The architecture's network. Raises ForgeError naming the first thing that this engine does not compute."""
    network = NETWORKS.get(config.architecture)
    quantization, parallel = config.quantization, config.parallel
    tp, pp, layers = parallel.tp, parallel.pp, config.num_hidden_layers
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    refuses_qk_norm = network is not None and network.head_norm == "never"
    supported = (
        ("architecture", config.architecture, network is not None, ", ".join(NETWORKS)),
        ("hidden_act", config.hidden_act, config.hidden_act in ACTIVATIONS, ", ".join(ACTIVATIONS)),
        (
            "position_embedding_type",
            config.position_embedding_type,
            config.position_embedding_type in POSITIONS,
            ", ".join(POSITIONS),
        ),
        ("qk_layernorm", config.qk_layernorm, not (config.qk_layernorm and refuses_qk_norm), "false"),
        _off(config, "apply_query_key_layer_scaling"),
        _off(config, "residual_mlp"),
        _off(config, "use_logn_attn"),
        _off(config, "inner_layernorm"),
        _off(config, "apply_residual_connection_post_layernorm"),
        (
            "quantization.quant_algo",
            quantization.quant_algo,
            quantization.quant_algo in ALGORITHMS,
            ", ".join(name for name in ALGORITHMS if name),
        ),
        (
            "quantization.kv_cache_quant_algo",
            quantization.kv_cache_quant_algo,
            quantization.kv_cache_quant_algo in KV_FORMATS,
            ", ".join(name for name in KV_FORMATS if name),
        ),
        ("mapping.cp_size", parallel.cp, parallel.cp == 1, "1"),
        ("mapping.pp_size", pp, layers % pp == 0, f"divisors of {layers} layers"),
        (
            "mapping.tp_size",
            tp,
            heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0) and config.intermediate_size % tp == 0,
            f"divisors of {heads} heads, {kv_heads} KV heads and {config.intermediate_size} inner units",
        ),
    )
    for key, value, known, allowed in supported:
        if not known:
            raise ForgeError(
                f"config.json: {key} {value} is not known to the embedded engine",
                hint=f"It computes {allowed}; use the tensorrt_llm backend for this model.",
            )
    assert network is not None
    return network


def _off(config: CheckpointConfig, key: str) -> tuple[str, object, bool, str]:
    """A feature that no family here uses."""
    return key, getattr(config, key, None), not flag(config, key), "false"
