"""Gemma: a Llama with GELU, norms stored as weight + 1, a scaled embedding and a tied head.

Source: tensorrt_llm/models/gemma/convert.py and config.py (0.17), whose network requires a sharded embedding if tp > 1.
"""

from typing import Any

from trtforge.formats.hf import HfConfig
from trtforge.models.families.common import (
    EMBED,
    HEAD,
    ROTARY_TABLES,
    decoder_sizes,
    dense,
    gated_mlp,
    qkv,
    require,
    rotary,
    with_defaults,
)
from trtforge.models.family import Facts, Family, PipelineStage, Sizes, Vector, holding

INPUT_NORM = Vector("input_layernorm.weight", "input_layernorm.weight", "hidden", plus_one=True)
POST_NORM = Vector("post_layernorm.weight", "post_attention_layernorm.weight", "hidden", plus_one=True)
FINAL_NORM = Vector("transformer.ln_f.weight", "model.norm.weight", "hidden", PipelineStage.LAST, plus_one=True)


GELU, ONE_ACTIVATION = "gelu_pytorch_tanh", "TensorRT-LLM's Gemma has one activation"


def gemma_fields(config: HfConfig, sizes: Sizes) -> dict[str, Any]:
    """The config fields of TensorRT-LLM's GemmaConfig."""
    require(config, "use_bidirectional_attention", False, (False,), "TensorRT-LLM's Gemma is causal")
    for key in ("hidden_activation", "hidden_act"):  # releases of transformers differ in which one they read
        require(config, key, GELU, (GELU, "gelu"), ONE_ACTIVATION)
    return {
        "hidden_act": GELU,
        "norm_epsilon": config.number("rms_norm_eps", 1e-6, least=0),
        **rotary(config, sizes),
        "attn_bias": config.flag("attention_bias"),
        "mlp_bias": False,
        "inter_layernorms": False,
    }


_DEFAULTS = {"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192}  # GemmaConfig's


def facts(config: HfConfig) -> Facts:
    """The facts of a Gemma config.json."""
    config = with_defaults(config, _DEFAULTS)
    sizes = decoder_sizes(config)
    bias = config.flag("attention_bias")
    return Facts(
        sizes=sizes,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        config=gemma_fields(config, sizes),
        holding=holding(qkv_bias=bias, dense_bias=bias),
    )


FAMILY = Family(
    name="gemma",
    architectures={"GemmaForCausalLM": "GemmaForCausalLM"},
    layer_prefix="model.layers",
    layer=(INPUT_NORM, qkv(), dense(), POST_NORM, *gated_mlp(bias=None)),
    model=(EMBED, FINAL_NORM, HEAD),
    facts=facts,
    dropped=ROTARY_TABLES,
    parallel_embedding="when_split",
)
