"""Qwen3: a Llama whose queries and keys are normalised per head (tensorrt_llm/models/qwen, 1.0)."""

from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families import llama, qwen2
from trtforge.models.families.common import INPUT_NORM, POST_NORM, QK_NORM, dense, gated_mlp, qkv, with_defaults
from trtforge.models.family import Facts, holding

LAYER = (INPUT_NORM, qkv(), *QK_NORM, dense(), POST_NORM, *gated_mlp())
_DEFAULTS = {"head_dim": 128}  # Qwen3Config's


def facts(config: HfConfig) -> Facts:
    """The facts of a Qwen3 config.json."""
    base = qwen2.facts(with_defaults(config, _DEFAULTS))
    bias = config.flag("attention_bias")
    return replace(
        base,
        config={**base.config, "attn_bias": bias, "qwen_type": "qwen3"},
        holding=holding(qkv_bias=bias, dense_bias=bias, qk_norm=True),
    )


FAMILY = replace(
    llama.FAMILY,
    name="qwen3",
    architectures={"Qwen3ForCausalLM": "Qwen3ForCausalLM"},
    layer=LAYER,
    facts=facts,
)
