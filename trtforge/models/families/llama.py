"""Llama 2, 3 and 3.x: grouped-query attention, gated MLP, RMSNorm, rotary positions with every HF scaling.

Names: tensorrt_llm/models/llama/convert.py and config.py (0.17). TensorRT-LLM calls HF's gate_proj `fc` and HF's
up_proj `gate`. Its converter drops the biases of `mlp_bias`, which its network supports; we write them.
"""

from typing import Any

from trtforge.formats.hf import HfConfig
from trtforge.models.families.common import LLAMA_LAYER, LLAMA_MODEL, ROTARY_TABLES, decoder_sizes, require, rotary
from trtforge.models.family import Facts, Family, Sizes, holding


def llama_fields(config: HfConfig, sizes: Sizes) -> dict[str, Any]:
    """The config fields of TensorRT-LLM's LLaMAConfig. Raises ForgeError for an activation that it lacks."""
    require(config, "hidden_act", "silu", ("silu",), "TensorRT-LLM's Llama has the gated SiLU MLP only")
    return {
        "hidden_act": "silu",
        "norm_epsilon": config.number("rms_norm_eps", 1e-6, least=0),
        **rotary(config, sizes),
        "attn_bias": config.flag("attention_bias"),
        "mlp_bias": config.flag("mlp_bias"),
    }


def facts(config: HfConfig) -> Facts:
    """The facts of a Llama config.json."""
    sizes = decoder_sizes(config)
    attn_bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    return Facts(
        sizes=sizes,
        tied_embeddings=config.flag("tie_word_embeddings"),
        config=llama_fields(config, sizes),
        holding=holding(qkv_bias=attn_bias, dense_bias=attn_bias, mlp_bias=mlp_bias),
    )


FAMILY = Family(
    name="llama",
    architectures={"LlamaForCausalLM": "LlamaForCausalLM"},
    layer_prefix="model.layers",
    layer=LLAMA_LAYER,
    model=LLAMA_MODEL,
    facts=facts,
    dropped=ROTARY_TABLES,
)
