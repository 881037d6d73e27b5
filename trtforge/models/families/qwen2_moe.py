"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts and a shared expert (tensorrt_llm/models/qwen)."""

from dataclasses import replace
from typing import Any

from trtforge.formats.hf import HfConfig
from trtforge.models.families import qwen2
from trtforge.models.families.common import (
    EXPERT,
    INPUT_NORM,
    POST_NORM,
    dense,
    experts,
    gated_mlp,
    moe_fields,
    qkv,
    router,
    shared_expert,
    sliding_layers,
    sliding_window,
    with_defaults,
)
from trtforge.models.family import Facts, Linear, Part, Split, holding

EXPERTS = experts(gate=f"{EXPERT}.gate_proj", up=f"{EXPERT}.up_proj", down=f"{EXPERT}.down_proj")
SHARED_AND_EXPERTS = (
    router("mlp.gate"),
    *EXPERTS,
    *shared_expert("mlp.shared_expert"),
    Linear(
        "mlp.shared_expert_gate",
        (Part("mlp.shared_expert_gate", "one"),),
        inputs="hidden",
        split=Split.REPLICATE,
        quantized=False,
        when="sparse_layer",
    ),
)
"""A router, experts, and a shared expert for every token with its own gate."""
LAYER = (INPUT_NORM, qkv(), dense(), POST_NORM, *gated_mlp(bias=None, when="dense_layer"), *SHARED_AND_EXPERTS)

_DEFAULTS = {**qwen2.DEFAULTS, "num_key_value_heads": 16}  # Qwen2MoeConfig's


def expert_count(config: HfConfig) -> int:
    """`num_experts`, which transformers 5 calls `num_local_experts` when it saves Qwen3-MoE."""
    return config.integer("num_experts", config.values.get("num_local_experts"))


def sparse_layers(config: HfConfig, num_layers: int) -> frozenset[int]:
    """The layers with experts: every `decoder_sparse_step`-th except `mlp_only_layers` (transformers
    modeling_qwen2_moe.py)."""
    step, dense_layers = config.integer("decoder_sparse_step", 1), config.items("mlp_only_layers")
    return frozenset(i for i in range(num_layers) if i not in dense_layers and (i + 1) % step == 0)


def dense_fields(config: HfConfig) -> dict[str, Any]:
    """Which layers are dense, as TensorRT-LLM 1.0 reads it (models/qwen/config.py)."""
    return {
        "decoder_sparse_step": config.integer("decoder_sparse_step", 1),
        "mlp_only_layers": list(config.items("mlp_only_layers")),
    }


def window_layers(config: HfConfig, num_layers: int) -> tuple[int, ...]:
    """The layers with a sliding window: those of `layer_types`, or every other one before `max_window_layers`.

    Source: transformers 5, models/qwen2_moe/configuration_qwen2_moe.py.
    """
    if not config.flag("use_sliding_window"):
        return ()
    layers = sliding_layers(config)
    return tuple(range(0, min(qwen2.max_window_layers(config), num_layers), 2)) if layers is None else layers


def facts(config: HfConfig) -> Facts:
    """The facts of a Qwen2-MoE config.json."""
    config = with_defaults(config, _DEFAULTS)
    base = qwen2.facts(config)
    count, inner = expert_count(config), config.integer("moe_intermediate_size")
    shared = config.integer("shared_expert_intermediate_size")
    normalization = int(config.flag("norm_topk_prob"))
    moe = moe_fields(count, config.integer("num_experts_per_tok"), normalization, shared)
    bias = config.flag("qkv_bias", True)
    return replace(
        base,
        sizes=replace(base.sizes, more={"experts": count, "moe_intermediate": inner, "shared_intermediate": shared}),
        config={
            **base.config,
            "hidden_act": "swiglu",
            "attn_bias": bias,
            "qwen_type": "qwen2_moe",
            "moe": moe,
            "moe_intermediate_size": inner,
            "moe_shared_expert_intermediate_size": shared,
            **dense_fields(config),
            **sliding_window(config, window_layers(config, base.sizes.num_layers)),
        },
        holding=holding(qkv_bias=bias),
        sparse_layers=sparse_layers(config, base.sizes.num_layers),
    )


FAMILY = replace(
    qwen2.FAMILY,
    name="qwen2_moe",
    architectures={"Qwen2MoeForCausalLM": "Qwen2MoeForCausalLM"},
    layer=LAYER,
    facts=facts,
)
