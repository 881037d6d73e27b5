"""Gemma 3 (text): Gemma 2 with normalised queries and keys, and a separate rotary base for sliding-window layers."""

from dataclasses import replace
from typing import Any

from trtforge.formats.hf import HfConfig
from trtforge.models.families import gemma, gemma2
from trtforge.models.families.common import (
    QK_NORM,
    dense,
    gated_mlp,
    qkv,
    require,
    sliding_layers,
    sliding_window,
    with_defaults,
)
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

_BASE, _LOCAL_BASE = 1000000.0, 10000.0
_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
"""Gemma3TextConfig's, on which the published models with vision rely."""


def facts(config: HfConfig) -> Facts:
    """The facts of a Gemma 3 config.json. Raises ForgeError for features that TensorRT-LLM's network lacks."""
    require(config, "hidden_activation", gemma.GELU, (gemma.GELU,), gemma.ONE_ACTIVATION)
    config, local_base = _rotations(with_defaults(config, _DEFAULTS))
    base = gemma.facts(config)
    pattern = config.count("_sliding_window_pattern") or config.count("sliding_window_pattern") or 6
    every = tuple(layer for layer in range(base.sizes.num_layers) if (layer + 1) % pattern)
    layers = sliding_layers(config)
    fields = {
        "inter_layernorms": True,
        "query_pre_attn_scalar": config.integer("query_pre_attn_scalar", 256),
        "final_logit_softcapping": config.positive_or_none("final_logit_softcapping"),
        "rope_local_base_freq": local_base,
        "_sliding_window_pattern": pattern,
        **sliding_window(config, every if layers is None else layers),
    }
    return replace(base, config={**base.config, **fields})


def _rotations(config: HfConfig) -> tuple[HfConfig, float]:
    """The config.json with the RoPE parameters of layers without a window, and the RoPE base of those with one.

    transformers 5 nests the rotary parameters by layer type. Raises ForgeError for RoPE scaling in layers with windows.
    """
    nested: dict[str, Any] = config.values.get("rope_parameters") or {}
    local_base = config.number("rope_local_base_freq", _LOCAL_BASE, above=0)
    whole = nested
    if "full_attention" in nested or "sliding_attention" in nested:
        sliding = HfConfig(nested.get("sliding_attention") or {}, config.path)
        why = "TensorRT-LLM's Gemma 3 scales no positions of layers with a sliding window"
        require(sliding, "rope_type", sliding.values.get("type", "default"), ("default",), why)
        local_base = sliding.number("rope_theta", local_base, above=0)
        whole = nested.get("full_attention") or {}
    values = {"rope_theta": config.number("rope_theta", _BASE, above=0), "rope_scaling": None}
    whole = {**whole, **(config.values.get("rope_scaling") or {})}
    return HfConfig({**config.values, **values, "rope_parameters": whole}, config.path), local_base


FAMILY = replace(
    gemma.FAMILY,
    name="gemma3",
    architectures={"Gemma3ForCausalLM": "Gemma3ForCausalLM"},
    layer=LAYER,
    facts=facts,
)
