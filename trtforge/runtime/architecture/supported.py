"""Checks that the embedded engine supports a checkpoint; refusals name the first unsupported value."""

from trtforge.core.errors import ForgeError
from trtforge.core.recipe import KvCacheFormat, QuantFormat
from trtforge.formats.checkpoint_keys import flag
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.formats import CACHE_ALGORITHMS, FORMATS, algorithm_of
from trtforge.runtime.architecture.activations import ACTIVATIONS
from trtforge.runtime.architecture.network import NETWORKS, Network
from trtforge.runtime.architecture.positions import POSITIONS

ALGORITHMS: dict[str | None, QuantFormat] = {format.algorithm: name for name, format in FORMATS.items()}
ALGORITHMS["NO_QUANT"] = "none"
"""By TensorRT-LLM's quant_algo."""
KV_FORMATS: dict[str | None, KvCacheFormat] = {algorithm: name for name, algorithm in CACHE_ALGORITHMS.items()}
"""By TensorRT-LLM's kv_cache_quant_algo."""


def supported_network(config: CheckpointConfig) -> Network:
    """The architecture's network. Raises ForgeError naming the first unsupported value of config.json."""
    network = NETWORKS.get(config.base_architecture)
    quantization, parallel = config.quantization, config.parallel
    tp, pp, layers = parallel.tp, parallel.pp, config.num_hidden_layers
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    has_experts = bool((getattr(config, "moe", None) or {}).get("num_experts"))  # `MoeSpec` checks their size
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
            algorithm_of(quantization) in ALGORITHMS
            and all(
                layer.quant_algo in (algorithm_of(quantization), FORMATS["fp8"].algorithm)
                for layer in (quantization.quantized_layers or {}).values()
            ),
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
            heads % tp == 0
            and (kv_heads % tp == 0 or tp % kv_heads == 0)
            and (has_experts or config.intermediate_size % tp == 0),
            f"divisors of {heads} heads, {kv_heads} KV heads and {config.intermediate_size} inner units",
        ),
    )
    for key, value, is_supported, allowed in supported:
        if not is_supported:
            raise ForgeError(
                f"config.json: {key} {value} is not supported by the embedded engine",
                hint=f"It supports {allowed}; use the tensorrt_llm backend for this model.",
            )
    assert network is not None
    return network


def _off(config: CheckpointConfig, key: str) -> tuple[str, object, bool, str]:
    """A feature that the embedded engine does not support."""
    return key, getattr(config, key, None), not flag(config, key), "false"
