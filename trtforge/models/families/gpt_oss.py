"""GPT-OSS: attention sinks, windows in every other layer, experts with biases whose gate is clamped.

Gate and up projection of an expert are one matrix with alternating rows, in rank files too; a rank gets whole pairs.
Only TensorRT-LLM's PyTorch backend runs it (_torch/models/modeling_gpt_oss.py, 1.2). Its loader reads experts in
bfloat16 and in MXFP4. Windows and the gate's alpha and limit are constants in it; other values are refused here.
"""

from dataclasses import replace
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfConfig
from trtforge.models.families import llama
from trtforge.models.families.common import (
    EXPERT,
    INPUT_NORM,
    POST_NORM,
    dense,
    moe_fields,
    qkv,
    require,
    router,
    sliding_layers,
    sliding_window,
)
from trtforge.models.family import ExpertBias, Experts, Facts, Part, Row, Split, Vector, holding

_NORMALISED = 1  # weights of the chosen experts sum to 1
_ALPHA, _LIMIT = 1.702, 7.0
_DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Defaults of absent keys: transformers/models/gpt_oss/configuration_gpt_oss.py (5.23)."""

LAYER: tuple[Row, ...] = (
    INPUT_NORM,
    replace(qkv(), quantized=False),
    replace(dense(), quantized=False),
    Vector("attention.sinks", "self_attn.sinks", "one", heads="q"),
    POST_NORM,
    replace(router("mlp.router"), bias="router_bias"),
    Experts("mlp.fc", (Part(f"{EXPERT}.gate_up_proj", "gate_up"),), "hidden", Split.COLUMN, stacked=True),
    ExpertBias("mlp.fc.bias", "mlp.experts.gate_up_proj_bias", "gate_up", Split.COLUMN),
    Experts("mlp.proj", (Part(f"{EXPERT}.down_proj", "hidden"),), "moe_intermediate", Split.ROW, stacked=True),
    ExpertBias("mlp.proj.bias", "mlp.experts.down_proj_bias", "hidden", Split.ROW),
)


def facts(config: HfConfig) -> Facts:
    """The facts of a GPT-OSS config.json."""
    given = {key: value for key, value in config.values.items() if value is not None}
    rope = {} if "rope_scaling" in given or "rope_parameters" in given else {"rope_parameters": _ROPE}
    config = HfConfig({**_DEFAULTS, **rope, **given}, config.path)
    why = "TensorRT-LLM's GPT-OSS has it as a constant"
    require(config, "attention_bias", True, (True,), why)
    require(config, "swiglu_alpha", _ALPHA, (_ALPHA,), why)
    require(config, "swiglu_limit", _LIMIT, (_LIMIT,), why)
    base = llama.facts(config)
    count, inner = config.integer("num_local_experts"), config.integer("intermediate_size")
    return replace(
        base,
        sizes=replace(base.sizes, more={"experts": count, "moe_intermediate": inner, "gate_up": 2 * inner}),
        config={
            **base.config,
            "hidden_act": "swiglu",
            "moe": moe_fields(count, config.integer("num_experts_per_tok"), _NORMALISED),
            "moe_intermediate_size": inner,
            "swiglu_alpha": _ALPHA,
            "swiglu_limit": _LIMIT,
            **sliding_window(config, _windowed(config, base.sizes.num_layers)),
        },
        holding=holding(qkv_bias=True, dense_bias=True, router_bias=True),
        sparse_layers=frozenset(range(base.sizes.num_layers)),
    )


def _windowed(config: HfConfig, layers: int) -> tuple[int, ...]:
    """The layers with a window: every other one from the first. Raises ForgeError for other `layer_types`."""
    expected, given = tuple(range(0, layers, 2)), sliding_layers(config)
    if given is not None and given != expected:
        raise ForgeError(
            f"{config.path}: layer_types has windows in other layers than every other one from the first on",
            hint="TensorRT-LLM's GPT-OSS has no such layers: use the model's own config.json.",
        )
    return expected


FAMILY = replace(
    llama.FAMILY,
    name="gpt_oss",
    architectures={"GptOssForCausalLM": "GptOssForCausalLM"},
    layer=LAYER,
    facts=facts,
    engines=False,
)
