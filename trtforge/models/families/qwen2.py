"""Qwen2 and Qwen2.5: a Llama with query, key and value biases (tensorrt_llm/models/qwen/config.py, 0.17)."""

from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families import llama
from trtforge.models.families.common import moe_fields, sliding_layers, sliding_window, with_defaults
from trtforge.models.family import Facts, holding

NO_MOE = moe_fields(0, 0, normalization=0)

DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}
"""Defaults of transformers' configuration classes of Qwen2 and Qwen3."""


def window_layers(config: HfConfig, num_layers: int) -> tuple[int, ...]:
    """The layers with a sliding window: with `use_sliding_window`, those of `layer_types`, or from `max_window_layers`
    on."""
    if not config.flag("use_sliding_window"):
        return ()
    layers = sliding_layers(config)
    return tuple(range(max_window_layers(config), num_layers)) if layers is None else layers


def max_window_layers(config: HfConfig) -> int:
    """`max_window_layers` of config.json, which may be 0."""
    return 28 if config.values.get("max_window_layers") is None else config.count("max_window_layers")


def facts(config: HfConfig) -> Facts:
    """The facts of a Qwen2 config.json."""
    config = with_defaults(config, DEFAULTS)
    base = llama.facts(config)
    return replace(
        base,
        config={
            **base.config,
            "attn_bias": True,
            "mlp_bias": False,
            "qwen_type": "qwen2",
            "seq_length": 8192,
            "use_logn_attn": False,
            "moe": NO_MOE,
            "moe_intermediate_size": 0,
            "moe_shared_expert_intermediate_size": 0,
            **sliding_window(config, window_layers(config, base.sizes.num_layers)),
        },
        holding=holding(qkv_bias=True),
    )


FAMILY = replace(
    llama.FAMILY,
    name="qwen2",
    architectures={"Qwen2ForCausalLM": "Qwen2ForCausalLM"},
    facts=facts,
)
