"""Cohere's Command R: parallel attention and MLP after one norm without bias, GPT-J rotary style, scaled logits.

Source: tensorrt_llm/models/commandr/config.py and model.py (0.17), whose network always shards a tied embedding.
"""

from trtforge.formats.hf import HfConfig
from trtforge.models.families.common import (
    INPUT_NORM,
    LLAMA_MODEL,
    ROTARY_TABLES,
    decoder_sizes,
    dense,
    gated_mlp,
    qkv,
    require,
    rotary,
    with_defaults,
)
from trtforge.models.family import Facts, Family, Vector, holding

_QK_NORM = (
    Vector("attention.q_layernorm.weight", "self_attn.q_norm.weight", "head", when="qk_norm", heads="q"),
    Vector("attention.k_layernorm.weight", "self_attn.k_norm.weight", "head", when="qk_norm", heads="kv"),
)

_DEFAULTS = {"rope_theta": 500000.0, "max_position_embeddings": 8192}  # CohereConfig's


def facts(config: HfConfig) -> Facts:
    """The facts of a Cohere config.json."""
    require(config, "hidden_act", "silu", ("silu",), "TensorRT-LLM's Cohere has the gated SiLU MLP only")
    config = with_defaults(config, _DEFAULTS)
    sizes, bias, qk_norm = decoder_sizes(config), config.flag("attention_bias"), config.flag("use_qk_norm")
    return Facts(
        sizes=sizes,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        config={
            "hidden_act": "silu",
            "norm_epsilon": config.number("layer_norm_eps", 1e-5, least=0),
            **rotary(config, sizes, style="rope_gptj"),
            "output_multiplier_scale": config.number("logit_scale", 0.0625),
            "attn_bias": bias,
            "qk_layernorm": qk_norm,
        },
        holding=holding(qkv_bias=bias, dense_bias=bias, qk_norm=qk_norm),
    )


FAMILY = Family(
    name="cohere",
    architectures={"CohereForCausalLM": "CohereForCausalLM"},
    layer_prefix="model.layers",
    layer=(INPUT_NORM, qkv(), *_QK_NORM, dense(), *gated_mlp(bias=None)),
    model=LLAMA_MODEL,
    facts=facts,
    dropped=ROTARY_TABLES,
    parallel_embedding="always",
)
