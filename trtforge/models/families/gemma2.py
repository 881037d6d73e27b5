"""Gemma 2: Gemma with norms on both sides of attention and MLP, soft-capped logits, a window every second layer."""

from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families import gemma
from trtforge.models.families.common import (
    dense,
    gated_mlp,
    qkv,
    require,
    sliding_layers,
    sliding_window,
    with_defaults,
)
from trtforge.models.family import Facts, Row, Vector

INNER_NORMS = tuple(
    Vector(f"{name}.weight", f"{name}.weight", "hidden", plus_one=True)
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")
)
LAYER: tuple[Row, ...] = (gemma.INPUT_NORM, qkv(), dense(), gemma.POST_NORM, *INNER_NORMS, *gated_mlp(bias=None))

_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
"""Gemma2Config's."""


def facts(config: HfConfig) -> Facts:
    """The facts of a Gemma 2 config.json."""
    require(config, "hidden_activation", gemma.GELU, (gemma.GELU,), gemma.ONE_ACTIVATION)
    config = with_defaults(config, _DEFAULTS)
    base = gemma.facts(config)
    layers = sliding_layers(config)
    fields = {
        "inter_layernorms": True,
        "query_pre_attn_scalar": config.integer("query_pre_attn_scalar"),
        "final_logit_softcapping": config.positive_or_none("final_logit_softcapping"),
        "attn_logit_softcapping": config.positive_or_none("attn_logit_softcapping"),
        **sliding_window(config, tuple(range(0, base.sizes.num_layers, 2)) if layers is None else layers),
    }
    return replace(base, config={**base.config, **fields})


FAMILY = replace(
    gemma.FAMILY,
    name="gemma2",
    architectures={"Gemma2ForCausalLM": "Gemma2ForCausalLM"},
    layer=LAYER,
    facts=facts,
)
