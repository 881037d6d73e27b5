"""Gemma 3 (text): Gemma 2 with normalised queries and keys, and a separate rotary base for sliding-window layers."""

from dataclasses import replace
from typing import Any

from trtforge.formats.hf import HfConfig
from trtforge.models.families import gemma, gemma2
from trtforge.models.families.common import QK_NORM, dense, gated_mlp, qkv, sliding_layers, sliding_window
from trtforge.models.family import Facts, Row

LAYER: tuple[Row, ...] = (
    gemma.INPUT_NORM,
    qkv(),
    *(replace(row, plus_one=True, when=None) for row in QK_NORM),
    dense(),
    gemma.POST_NORM,
    *gemma2.INNER_NORMS,
    *gated_mlp(bias=None),
)


def facts(config: HfConfig) -> Facts:
    """The facts of a Gemma 3 config.json; transformers 5 nests the rotary parameters by layer type."""
    nested: dict[str, Any] = config.values.get("rope_parameters") or {}
    local_base = config.number("rope_local_base_freq", 10000.0, above=0)
    if "full_attention" in nested:
        sliding = HfConfig(nested.get("sliding_attention") or {}, config.path)
        local_base = sliding.number("rope_theta", local_base, above=0)
        config = HfConfig({**config.values, "rope_parameters": nested["full_attention"]}, config.path)
    elif not nested and config.values.get("rope_theta") is None:
        config = HfConfig({**config.values, "rope_theta": 1000000.0}, config.path)
    base = gemma.facts(config)
    pattern = config.count("_sliding_window_pattern") or config.count("sliding_window_pattern") or 6
    every = tuple(layer for layer in range(base.sizes.num_layers) if (layer + 1) % pattern)
    fields = {
        "inter_layernorms": True,
        "query_pre_attn_scalar": config.integer("query_pre_attn_scalar", 256),
        "final_logit_softcapping": config.positive_or_none("final_logit_softcapping"),
        "rope_local_base_freq": local_base,
        "_sliding_window_pattern": pattern,
        **sliding_window(config, sliding_layers(config) or every),
    }
    return replace(base, config={**base.config, **fields})


FAMILY = replace(
    gemma.FAMILY,
    name="gemma3",
    architectures={"Gemma3ForCausalLM": "Gemma3ForCausalLM"},
    layer=LAYER,
    facts=facts,
)
