"""Phi-3, 3.5 and 4: a Llama that stores query, key and value in one matrix, gate and up in another; longrope.

Source: tensorrt_llm/models/phi3/convert.py and config.py (0.17): `mlp.fc` is [up; gate], there is no `mlp.gate`. Its
converter does not split over ranks; we split each half, as the network's fused MLP expects.
"""

import math
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import ITS_OWN_CONFIG, HfConfig
from trtforge.formats.rope import longrope_factor
from trtforge.models.families.common import (
    INPUT_NORM,
    LLAMA_MODEL,
    POST_NORM,
    ROTARY_TABLES,
    decoder_sizes,
    dense,
    fused_qkv,
    qkv,
    require,
    rotary,
    sliding_window,
    with_defaults,
)
from trtforge.models.family import Facts, Family, Linear, Part, Sizes, Split, Stacked

_LONGROPE = ("longrope", "su", "yarn")
"""transformers treats the other two as longrope (models/phi3/configuration_phi3.py)."""
_GATE_UP = "mlp.gate_up_proj"
LAYER = (
    INPUT_NORM,
    qkv(fused_qkv("self_attn.qkv_proj", "stacked"), bias=None),
    dense(bias=None),
    POST_NORM,
    Linear(
        "mlp.fc",
        (
            Part(_GATE_UP, "intermediate", Stacked(("intermediate",), ("intermediate", "intermediate"))),
            Part(_GATE_UP, "intermediate", Stacked((), ("intermediate", "intermediate"))),
        ),
        inputs="hidden",
        split=Split.COLUMN,
    ),
    Linear("mlp.proj", (Part("mlp.down_proj", "hidden"),), "intermediate", Split.ROW),
)
_DEFAULTS = {"max_position_embeddings": 4096}  # Phi3Config's


def facts(config: HfConfig) -> Facts:
    """The facts of a Phi-3 config.json."""
    require(config, "hidden_act", "silu", ("silu",), "TensorRT-LLM's Phi-3 has the gated SiLU MLP only")
    config = with_defaults(config, _DEFAULTS)
    sizes = decoder_sizes(config)
    return Facts(
        sizes=sizes,
        tied_embeddings=config.flag("tie_word_embeddings"),
        config={
            "hidden_act": "swiglu",
            "norm_epsilon": config.number("rms_norm_eps", 1e-5, least=0),
            **_positions(config, sizes),
            **sliding_window(config),
        },
    )


def _positions(config: HfConfig, sizes: Sizes) -> dict[str, Any]:
    fraction = config.partial_rotary(1.0)
    fields = rotary(config, sizes, fraction, also=("su",)) | {"rotary_pct": fraction}
    scaling = fields["rotary_scaling"]
    if scaling is None:
        return fields
    if scaling.get("rope_type", scaling.get("type")) not in _LONGROPE:
        raise ForgeError(f"{config.path}: rope_scaling is not longrope", hint="Phi-3 has no other scaling.")
    short, long = scaling.get("short_factor"), scaling.get("long_factor")
    if not isinstance(short, list) or not isinstance(long, list):
        raise ForgeError(
            f"{config.path}: longrope without short_factor and long_factor",
            hint=ITS_OWN_CONFIG,
        )
    original = config.integer("original_max_position_embeddings", 4096)
    _require_default_factor(config, scaling, sizes.max_positions, original)
    return fields | {
        "position_embedding_type": "long_rope",
        "rotary_scaling": None,
        "original_max_position_embeddings": original,
        "longrope_scaling_short_factors": short,
        "longrope_scaling_long_factors": long,
    }


def _require_default_factor(config: HfConfig, scaling: dict[str, Any], positions: int, original: int) -> None:
    """Raises ForgeError if the factor on cosines and sines does not follow from the two lengths."""
    factor, default = (longrope_factor(each, positions, original) for each in (scaling, {}))
    if not math.isclose(factor, default, rel_tol=1e-6):
        raise ForgeError(
            f"{config.path}: rope_scaling: factor or attention_factor scales attention by {factor:.6g}",
            hint=f"TensorRT-LLM's Phi-3 scales by {default:.6g}, from {positions} and {original} positions, only.",
        )


FAMILY = Family(
    name="phi3",
    architectures={"Phi3ForCausalLM": "Phi3ForCausalLM"},
    layer_prefix="model.layers",
    layer=LAYER,
    model=LLAMA_MODEL,
    facts=facts,
    dropped=ROTARY_TABLES,
)
