"""EXAONE 4: a Llama that normalises the outputs of attention and MLP instead of their inputs, and queries and keys per
head. With sliding windows, only the layers that have one rotate queries and keys.

Only TensorRT-LLM's PyTorch backend runs it (_torch/models/modeling_exaone4.py).
"""

from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families import llama
from trtforge.models.families.common import (
    POST_NORM,
    QK_NORM,
    dense,
    gated_mlp,
    qkv,
    require,
    sliding_layers,
    sliding_window,
    with_defaults,
)
from trtforge.models.family import Facts, Row, Vector, holding

LAYER: tuple[Row, ...] = (
    qkv(),
    *QK_NORM,
    dense(),
    POST_NORM,
    *gated_mlp(),
    Vector("post_feedforward_layernorm.weight", "post_feedforward_layernorm.weight", "hidden"),
)

_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "rms_norm_eps": 1e-5}  # Exaone4Config's


def facts(config: HfConfig) -> Facts:
    """The facts of an EXAONE 4 config.json; without `layer_types` every fourth layer attends to all tokens."""
    require(config, "attention_bias", False, (False,), "EXAONE 4 has no biases")
    require(config, "mlp_bias", False, (False,), "EXAONE 4 has no biases")
    config = with_defaults(config, _DEFAULTS)
    base = llama.facts(config)
    window = config.values.get("sliding_window") or None
    every = tuple(layer for layer in range(base.sizes.num_layers) if _has_window(config, layer))
    layers = sliding_layers(config)
    fields = {
        "qk_layernorm": True,
        "rope_in_windows_only": window is not None,
        **sliding_window(config, every if layers is None else layers),
    }
    return replace(base, config={**base.config, **fields}, holding=holding(qk_norm=True))


def _has_window(config: HfConfig, layer: int) -> bool:
    """Whether a layer has a window, by config.json: a repeated pattern of L (window) and G, or the period of G."""
    given = config.values.get("sliding_window_pattern")
    if isinstance(given, str) and given:
        return given[layer % len(given)] == "L"
    period = config.count("sliding_window_pattern") or 4
    return (layer + 1) % period != 0


FAMILY = replace(
    llama.FAMILY,
    name="exaone4",
    architectures={"Exaone4ForCausalLM": "Exaone4ForCausalLM"},
    layer=LAYER,
    facts=facts,
    engines=False,
)
