"""Qwen3-MoE: Qwen3 with experts and no shared expert (tensorrt_llm/models/qwen, 1.0).

TensorRT-LLM's converter ignores `norm_topk_prob`, but its network normalises if config.json says so; we write it.
"""

from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families import qwen2, qwen3
from trtforge.models.families.common import (
    INPUT_NORM,
    POST_NORM,
    QK_NORM,
    dense,
    gated_mlp,
    moe_fields,
    qkv,
    router,
    sliding_window,
    with_defaults,
)
from trtforge.models.families.qwen2_moe import EXPERTS, dense_fields, expert_count, sparse_layers
from trtforge.models.family import Facts

LAYER = (
    INPUT_NORM,
    qkv(),
    *QK_NORM,
    dense(),
    POST_NORM,
    *gated_mlp(bias=None, when="dense_layer"),
    router("mlp.gate"),
    *EXPERTS,
)
_DEFAULTS = {**qwen2.DEFAULTS, "num_key_value_heads": 4, "head_dim": None}  # Qwen3MoeConfig's


def facts(config: HfConfig) -> Facts:
    """The facts of a Qwen3-MoE config.json; with `use_sliding_window` all layers have a window."""
    config = with_defaults(config, _DEFAULTS)
    base = qwen3.facts(config)
    count, inner = expert_count(config), config.integer("moe_intermediate_size")
    moe = moe_fields(count, config.integer("num_experts_per_tok"), int(config.flag("norm_topk_prob")))
    fields = {
        "hidden_act": "swiglu",
        "qwen_type": "qwen3_moe",
        "moe": moe,
        "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": 0,
        **dense_fields(config),
        **sliding_window(config, None if config.flag("use_sliding_window") else ()),
    }
    return replace(
        base,
        sizes=replace(base.sizes, more={"experts": count, "moe_intermediate": inner}),
        config={**base.config, **fields},
        sparse_layers=sparse_layers(config, base.sizes.num_layers),
    )


FAMILY = replace(
    qwen3.FAMILY,
    name="qwen3_moe",
    architectures={"Qwen3MoeForCausalLM": "Qwen3MoeForCausalLM"},
    layer=LAYER,
    facts=facts,
)
