"""Qwen3-Next: gated DeltaNet in most layers, attention with a gated output in each fourth one, experts in all.

Its norms multiply by 1 + weight; the checkpoint stores the weight itself, so that nothing is rounded. Linear attention
is not quantised: TensorRT-LLM's loader expects that, and NVIDIA's ModelOpt leaves at least its convolution and, for
NVFP4, its input projections unquantised (pull requests 495 and 681). Only TensorRT-LLM's PyTorch backend runs the
family, from 1.2 on (_torch/models/modeling_qwen3_next.py, _torch/models/checkpoints/hf/qwen3_next_weight_mapper.py).
"""

from dataclasses import replace

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfConfig
from trtforge.models.families import llama
from trtforge.models.families.common import (
    INPUT_NORM,
    POST_NORM,
    dense,
    layer_types,
    moe_fields,
    require,
    rotary,
    with_defaults,
)
from trtforge.models.families.qwen2_moe import SHARED_AND_EXPERTS, expert_count
from trtforge.models.family import Facts, Linear, Part, PerHead, Row, Size, Split, Stacked, Vector
from trtforge.models.linear_attention import LINEAR_KEYS, linear_sizes

_INTERVAL, _ROTATED = 4, 0.25  # Qwen3NextConfig's defaults
_KINDS = ("linear_attention", "full_attention")
_OTHERS = "TensorRT-LLM's Qwen3-Next has no such layers: use the model's own config.json."
_HALVES: tuple[Size, ...] = ("q", "q")
_CONVOLVED: tuple[Size, ...] = ("linear_k", "linear_k", "linear_v")

_QKV_AND_GATE = Linear(
    "attention.qkv",
    (
        Part("self_attn.q_proj", "q", PerHead((), _HALVES)),
        Part("self_attn.k_proj", "kv"),
        Part("self_attn.v_proj", "kv"),
        Part("self_attn.q_proj", "q", PerHead(("q",), _HALVES)),
    ),
    inputs="hidden",
    split=Split.HEADS,
    when="attention_layer",
)
"""q_proj has, for each head, its query and then the gate of its output."""


def _linear(name: str, out: Size, inputs: Size, split: Split) -> Linear:
    part = Part(f"linear_attn.{name}", out)
    return Linear(f"linear_attention.{name}", (part,), inputs, split, quantized=False, when="linear_layer")


def _of_heads(name: str) -> Vector:
    target = f"linear_attention.{name}"
    return Vector(target, f"linear_attn.{name}", "linear_heads", when="linear_layer", split=Split.COLUMN)


LINEAR_ATTENTION: tuple[Row, ...] = (
    _linear("in_proj_qkvz", "linear_qkvz", "hidden", Split.COLUMN),
    _linear("in_proj_ba", "linear_ba", "hidden", Split.COLUMN),
    Linear(
        "linear_attention.conv1d",
        tuple(
            Part("linear_attn.conv1d", size, Stacked(_CONVOLVED[:index], _CONVOLVED))
            for index, size in enumerate(_CONVOLVED)
        ),
        inputs="conv_kernel",
        split=Split.COLUMN,
        quantized=False,
        when="linear_layer",
        depthwise=True,
    ),
    _of_heads("A_log"),
    _of_heads("dt_bias"),
    Vector("linear_attention.norm.weight", "linear_attn.norm.weight", "linear_head", when="linear_layer"),
    _linear("out_proj", "hidden", "linear_v", Split.ROW),
)
LAYER: tuple[Row, ...] = (
    INPUT_NORM,
    *LINEAR_ATTENTION,
    _QKV_AND_GATE,
    Vector("attention.q_layernorm.weight", "self_attn.q_norm.weight", "head", when="attention_layer"),
    Vector("attention.k_layernorm.weight", "self_attn.k_norm.weight", "head", when="attention_layer"),
    replace(dense(bias=None), when="attention_layer"),
    POST_NORM,
    *SHARED_AND_EXPERTS,
)
_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768}  # Qwen3NextConfig's


def facts(config: HfConfig) -> Facts:
    """The facts of a Qwen3-Next config.json. Raises ForgeError for features that TensorRT-LLM's network lacks."""
    require(config, "attention_bias", False, (False,), "TensorRT-LLM's loader expects no biases in Qwen3-Next")
    require(config, "decoder_sparse_step", 1, (1,), "TensorRT-LLM's Qwen3-Next has experts in every layer")
    require(config, "mlp_only_layers", [], ([],), "TensorRT-LLM's Qwen3-Next has experts in every layer")
    require(config, "norm_topk_prob", True, (True,), "TensorRT-LLM's Qwen3-Next normalises the experts' weights")
    config = with_defaults(config, _DEFAULTS)
    base = llama.facts(config)
    count, inner = expert_count(config), config.integer("moe_intermediate_size")
    normalised = int(config.flag("norm_topk_prob", True))
    shared, linear = config.integer("shared_expert_intermediate_size"), _linear_keys(config)
    more: dict[Size, int] = {"experts": count, "moe_intermediate": inner, "shared_intermediate": shared}
    layers = _linear_layers(config, base.sizes.num_layers)
    return replace(
        base,
        sizes=replace(base.sizes, more=more | linear_sizes(linear), linear_layers=frozenset(layers)),
        config={
            **base.config,
            **rotary(config, base.sizes, config.partial_rotary(_ROTATED)),
            **linear,
            "linear_layers": layers,
            "hidden_act": "swiglu",
            "moe": moe_fields(count, config.integer("num_experts_per_tok"), normalised, shared),
            "moe_intermediate_size": inner,
            "num_nextn_predict_layers": config.count("num_nextn_predict_layers"),
        },
        sparse_layers=frozenset(range(base.sizes.num_layers)),
    )


def _linear_keys(config: HfConfig) -> dict[str, int]:
    """The sizes of linear attention. Raises ForgeError for value heads that key heads cannot share evenly."""
    values = {key: config.integer(key) for key in LINEAR_KEYS}
    groups, heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    if heads % groups:
        raise _unlike(config, f"linear_num_value_heads {heads} is no multiple of linear_num_key_heads {groups}")
    return values


def _linear_layers(config: HfConfig, num_layers: int) -> list[int]:
    """The layers with linear attention: as `layer_types` says, or all but each `full_attention_interval`-th one."""
    kinds = layer_types(config, _KINDS, hint=_OTHERS)
    if not kinds:
        interval = config.integer("full_attention_interval", _INTERVAL)
        kinds = [_KINDS[(layer + 1) % interval == 0] for layer in range(num_layers)]
    if "full_attention" not in kinds:
        raise _unlike(config, "no layer has full attention")
    return [layer for layer, kind in enumerate(kinds) if kind == "linear_attention"]


def _unlike(config: HfConfig, what: str) -> ForgeError:
    return ForgeError(f"{config.path}: {what}", hint=_OTHERS)


FAMILY = replace(
    llama.FAMILY,
    name="qwen3_next",
    architectures={"Qwen3NextForCausalLM": "Qwen3NextForCausalLM"},
    layer=LAYER,
    facts=facts,
    engines=False,
    predictor="mtp.",
)
