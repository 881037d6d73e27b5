"""Llama 4: experts that are stacked in two tensors, and layers of two kinds of attention.

Most layers rotate queries and keys, normalise them without a weight and attend within chunks of the sequence; each
fourth one attends to all tokens, without positions, its queries scaled by theirs. The scores of the chosen experts are
sigmoids that multiply the experts' inputs. Only TensorRT-LLM's PyTorch backend runs it
(_torch/models/modeling_llama.py), as Llama4ForConditionalGeneration.
"""

from dataclasses import replace
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfConfig
from trtforge.models.families import llama
from trtforge.models.families.common import (
    INPUT_NORM,
    POST_NORM,
    dense,
    gated_mlp,
    moe_fields,
    qkv,
    rotary,
    router,
    shared_expert,
    with_defaults,
)
from trtforge.models.family import Experts, Facts, Part, Row, Size, Split, Stacked, holding

_CHUNK, _TUNED_FROM, _TUNED_BY, _NOPE_PERIOD = 8192, 8192, 0.1, 4  # Llama4TextConfig's defaults
_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
_EXPERTS = "feed_forward.experts.{}"
_HALVES: tuple[Size, ...] = ("moe_intermediate", "moe_intermediate")


def _gated(mlp: str) -> tuple[Row, ...]:
    return tuple(
        replace(row, parts=tuple(replace(part, module=f"{mlp}.{part.module.partition('.')[2]}") for part in row.parts))
        for row in gated_mlp(bias=None, when="dense_layer")
    )


LAYER: tuple[Row, ...] = (
    INPUT_NORM,
    qkv(),
    dense(),
    POST_NORM,
    *_gated("feed_forward"),
    router("feed_forward.router"),
    Experts(
        "mlp.fc",
        (
            Part(f"{_EXPERTS}.gate_up_proj", "moe_intermediate", Stacked(("moe_intermediate",), _HALVES)),
            Part(f"{_EXPERTS}.gate_up_proj", "moe_intermediate", Stacked((), _HALVES)),
        ),
        "hidden",
        Split.COLUMN,
        stacked=True,
        all_tokens=True,
    ),
    Experts(
        "mlp.proj",
        (Part(f"{_EXPERTS}.down_proj", "hidden"),),
        "moe_intermediate",
        Split.ROW,
        stacked=True,
        all_tokens=True,
    ),
    *shared_expert("feed_forward.shared_expert"),
)


def facts(config: HfConfig) -> Facts:
    """The facts of a Llama 4 config.json, or of its text_config."""
    config = with_defaults(config, _DEFAULTS)
    inner, experts = config.integer("intermediate_size"), config.integer("num_local_experts")
    values = {**config.values, "intermediate_size": config.integer("intermediate_size_mlp")}
    base = llama.facts(HfConfig({**values, "rope_scaling": None, "rope_parameters": None}, config.path))
    layers = range(base.sizes.num_layers)
    step = config.integer("interleave_moe_layer_step", 1)
    sparse = frozenset(layer for layer in layers if (layer + 1) % step == 0)
    return replace(
        base,
        sizes=replace(base.sizes, more={"experts": experts, "moe_intermediate": inner, "shared_intermediate": inner}),
        config={
            **base.config,
            **rotary(config, base.sizes, style="rope_gptj", abrupt=True),
            "moe": moe_fields(experts, config.integer("num_experts_per_tok", 1), 0, inner),
            "hidden_act": "swiglu",
            "moe_intermediate_size": inner,
            "decoder_sparse_step": step,
            "scoring_func": "sigmoid_of_inputs",
            **_attention(config, layers),
        },
        holding=holding(qkv_bias=config.flag("attention_bias"), dense_bias=config.flag("attention_bias")),
        sparse_layers=sparse,
    )


def _attention(config: HfConfig, layers: range) -> dict[str, Any]:
    """The fields of the two kinds of layers. `no_rope_layers` has a 0 for each layer without positions, despite its
    name.

    Raises ForgeError for lists of layers that contradict one another.
    """
    rotated = config.items("no_rope_layers")
    if not rotated:
        period = config.integer("no_rope_layer_interval", _NOPE_PERIOD)
        rotated = [int((layer + 1) % period != 0) for layer in layers]
    if len(rotated) != len(layers) or any(kind not in (0, 1) for kind in rotated):
        raise _unlike(config, f"no_rope_layers is not a 0 or 1 for each of {len(layers)} layers")
    kinds = config.items("layer_types")
    if kinds and kinds != ["chunked_attention" if kind else "full_attention" for kind in rotated]:
        raise _unlike(config, "layer_types does not agree with no_rope_layers")
    step = config.integer("interleave_moe_layer_step", 1)
    sparse = config.items("moe_layers")
    if sparse and sparse != [layer for layer in layers if (layer + 1) % step == 0]:
        raise _unlike(config, f"moe_layers does not agree with interleave_moe_layer_step {step}")
    given = "attention_chunk_size" in config.values
    tuned = config.flag("attn_temperature_tuning", True)
    return {
        "attention_chunk_size": config.count("attention_chunk_size") if given else _CHUNK,
        "nope_layers": [layer for layer, kind in zip(layers, rotated, strict=True) if not kind],
        "qk_l2_norm": config.flag("use_qk_norm", True),
        "attn_temperature_tuning": tuned,
        "floor_scale": config.number("floor_scale", _TUNED_FROM, above=0),
        "attn_scale": config.number("attn_scale", _TUNED_BY),
    }


def _unlike(config: HfConfig, what: str) -> ForgeError:
    return ForgeError(
        f"{config.path}: {what}", hint="TensorRT-LLM's Llama 4 has no such layers: use the model's own config.json."
    )


FAMILY = replace(
    llama.FAMILY,
    name="llama4",
    architectures={"Llama4ForCausalLM": "Llama4ForCausalLM"},
    layer=LAYER,
    facts=facts,
    engines=False,
)
