"""GLM-4.5 and 4.6: heads of which half is rotated, and experts chosen by sigmoid scores after the first dense layers.

Only TensorRT-LLM's PyTorch backend runs it (_torch/models/modeling_glm.py). Its MTP layers follow the decoder layers.
"""

from dataclasses import replace
from typing import Any

from trtforge.formats.checkpoint_values import require_choice
from trtforge.formats.hf import HfConfig
from trtforge.models.families import llama
from trtforge.models.families.common import (
    EXPERT,
    INPUT_NORM,
    POST_NORM,
    QK_NORM,
    ROUTER_BIAS,
    dense,
    experts,
    gated_mlp,
    moe_fields,
    qkv,
    rotary,
    router,
    shared_expert,
    with_defaults,
)
from trtforge.models.family import Facts, Row, holding

LAYER: tuple[Row, ...] = (
    INPUT_NORM,
    qkv(),
    *QK_NORM,
    dense(bias=None),
    POST_NORM,
    *gated_mlp(bias=None, when="dense_layer"),
    router("mlp.gate"),
    ROUTER_BIAS,
    *experts(gate=f"{EXPERT}.gate_proj", up=f"{EXPERT}.up_proj", down=f"{EXPERT}.down_proj"),
    *shared_expert("mlp.shared_experts"),
)

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
"""Glm4MoeConfig's."""


def facts(config: HfConfig) -> Facts:
    """The facts of a GLM-4 MoE config.json."""
    config = with_defaults(config, _DEFAULTS)
    base = llama.facts(config)
    inner, bias, norm = (
        config.integer("moe_intermediate_size"),
        config.flag("attention_bias"),
        config.flag("use_qk_norm"),
    )
    shared = inner * config.count("n_shared_experts")
    dense_layers = config.count("first_k_dense_replace")
    return replace(
        base,
        sizes=replace(
            base.sizes,
            more={
                "experts": config.integer("n_routed_experts"),
                "moe_intermediate": inner,
                "shared_intermediate": shared,
            },
        ),
        config={
            **base.config,
            **rotary(config, base.sizes, config.partial_rotary(0.5)),
            "hidden_act": "swiglu",
            "qk_layernorm": norm,
            "moe_intermediate_size": inner,
            "first_k_dense_replace": dense_layers,
            "num_nextn_predict_layers": config.count("num_nextn_predict_layers"),
            **sigmoid_moe(config, shared),
        },
        holding=holding(qkv_bias=bias, qk_norm=norm),
        sparse_layers=frozenset(range(dense_layers, base.sizes.num_layers)),
    )


def sigmoid_moe(config: HfConfig, shared: int) -> dict[str, Any]:
    """`moe` and how its experts are chosen: among the best groups, by sigmoid scores with a bias (noaux_tc)."""
    experts, top_k = config.integer("n_routed_experts"), config.integer("num_experts_per_tok")
    groups, best = config.count("n_group") or 1, config.count("topk_group") or 1
    limits = {"n_group": groups, "topk_group": best, "scaling": config.number("routed_scaling_factor", 1.0)}
    renormalize = int(config.flag("norm_topk_prob", True))
    if experts:
        require_choice(experts, top_k, groups, best, by_two=True)
    return {
        "moe": moe_fields(experts, top_k, 3 + renormalize, shared, **limits),
        "scoring_func": "sigmoid",
    }


FAMILY = replace(
    llama.FAMILY,
    name="glm4_moe",
    architectures={"Glm4MoeForCausalLM": "Glm4MoeForCausalLM"},
    layer=LAYER,
    facts=facts,
    engines=False,
    carries_layers=True,
)
