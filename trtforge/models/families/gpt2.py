"""GPT-2: learned positions, LayerNorm, biases, and matrices stored (in, out) (tensorrt_llm/models/gpt, 0.17)."""

from typing import Any

from trtforge.formats.hf import HfConfig
from trtforge.models.families.common import (
    activation,
    dense,
    embeddings,
    fused_qkv,
    gpt2_sizes,
    moe_fields,
    plain_mlp,
    qkv,
    require,
)
from trtforge.models.family import Embedding, Facts, Family, PipelineStage, Split, holding, layer_norm

POSITIONS = Embedding(
    "transformer.position_embedding.weight",
    "transformer.wpe.weight",
    Split.EMBEDDING,
    PipelineStage.FIRST,
    rows="positions",
)
EMBED, HEAD = embeddings("transformer.wte.weight", "lm_head.weight")
FINAL_NORM = layer_norm("transformer.ln_f", "transformer.ln_f", place=PipelineStage.LAST)


def gpt_fields(variant: str, *, bias: bool) -> dict[str, Any]:
    """The config fields of TensorRT-LLM's GPTConfig, which GPT-2, StarCoder and Nemotron share."""
    return {
        "gpt_variant": variant,
        "bias": bias,
        "q_scaling": 1,
        "embedding_scale": None,
        "apply_query_key_layer_scaling": False,
        "rotary_pct": 1.0,
        "inner_layernorm": False,
        "norm_before_bmm1": False,
        "moe": moe_fields(0, 0, normalization=1),
    }


def learned(config: HfConfig, variant: str) -> dict[str, Any]:
    """The config fields of the variants with learned positions."""
    require(config, "scale_attn_weights", True, (True,), "TensorRT-LLM's GPT scales attention by the head size")
    return {
        **gpt_fields(variant, bias=True),
        "hidden_act": activation(config, "activation_function"),
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5, least=0),
        "position_embedding_type": "learned_absolute",
        "rotary_embedding_dim": config.integer("n_embd") // config.integer("n_head"),
    }


def facts(config: HfConfig) -> Facts:
    """The facts of a GPT-2 config.json."""
    why = "TensorRT-LLM's GPT scales attention equally in all layers"
    require(config, "scale_attn_by_inverse_layer_idx", False, (False,), why)
    return Facts(
        sizes=gpt2_sizes(config),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        config=learned(config, "gpt2"),
        holding=holding(qkv_bias=True, dense_bias=True, mlp_bias=True),
    )


FAMILY = Family(
    name="gpt2",
    architectures={"GPT2LMHeadModel": "GPT2LMHeadModel"},
    layer_prefix="transformer.h",
    layer=(
        *layer_norm("input_layernorm", "ln_1"),
        qkv(fused_qkv("attn.c_attn", "stacked"), conv1d=True),
        dense("attn.c_proj", conv1d=True),
        *layer_norm("post_layernorm", "ln_2"),
        *plain_mlp("mlp.c_fc", "mlp.c_proj", conv1d=True),
    ),
    model=(EMBED, POSITIONS, *FINAL_NORM, HEAD),
    facts=facts,
    dropped=(".attn.bias", ".attn.masked_bias"),
    base_prefix="transformer.",
)
