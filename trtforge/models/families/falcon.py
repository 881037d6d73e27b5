"""Falcon: 7B (multi-query, one norm), 40B, 180B and 11B (the new decoder, one or two norms), RW (alibi, sequential).

Source: tensorrt_llm/models/falcon/convert.py and config.py (0.17).
"""

from trtforge.formats.hf import HfConfig
from trtforge.models.families.common import (
    dense,
    embeddings,
    fused_qkv,
    plain_mlp,
    qkv,
    require,
    require_causal,
    rotary,
)
from trtforge.models.family import Facts, Family, PipelineStage, Sizes, holding, layer_norm

EMBED, HEAD = embeddings("transformer.word_embeddings.weight", "lm_head.weight")


def facts(config: HfConfig) -> Facts:
    """The facts of a Falcon config.json, with current keys or those of the first releases (`n_layer`, `n_head_kv`)."""
    require(config, "activation", "gelu", ("gelu",), "TensorRT-LLM's Falcon has one activation")
    new = config.flag("new_decoder_architecture", config.values.get("model_type") == "RefinedWeb")
    parallel, bias = config.flag("parallel_attn", True), config.flag("bias")
    sizes = _sizes(config, new)
    norms = config.values.get("num_ln_in_parallel_attn") or (2 if new else None)
    fields = rotary(config, sizes)
    if config.flag("alibi"):
        fields |= {"position_embedding_type": "alibi_with_scale"}
    return Facts(
        sizes=sizes,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        config={
            "hidden_act": "gelu",
            "norm_epsilon": config.number("layer_norm_epsilon", 1e-5, least=0),
            **fields,
            "bias": bias,
            "parallel_attention": parallel,
            "num_ln_in_parallel_attn": norms,
            "new_decoder_architecture": new,
        },
        holding=holding(
            qkv_bias=bias,
            dense_bias=bias,
            mlp_bias=bias,
            two_norms=new and norms == 2,
            one_norm=not (new and norms == 2),
            sequential=not new and not parallel,
        ),
    )


def _sizes(config: HfConfig, new: bool) -> Sizes:
    require_causal(config)
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", config.values.get("n_head"))
    kv_heads = heads
    if new:
        kv_heads = config.integer("num_kv_heads", config.values.get("n_head_kv") or heads)
    elif config.flag("multi_query", True):
        kv_heads = 1
    return Sizes(
        num_layers=config.integer("num_hidden_layers", config.values.get("n_layer")),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=hidden // heads,
        hidden=hidden,
        intermediate=config.integer("ffn_hidden_size", 4 * hidden),
        vocab=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings", 2048),
    )


FAMILY = Family(
    name="falcon",
    architectures={"FalconForCausalLM": "FalconForCausalLM", "RWForCausalLM": "FalconForCausalLM"},
    layer_prefix="transformer.h",
    layer=(
        *layer_norm("input_layernorm", "input_layernorm", when="one_norm"),
        *layer_norm("input_layernorm", "ln_attn", when="two_norms"),
        *layer_norm("mlp_layernorm", "ln_mlp", when="two_norms"),
        qkv(fused_qkv("self_attention.query_key_value", "grouped")),
        dense("self_attention.dense"),
        *layer_norm("post_layernorm", "post_attention_layernorm", when="sequential"),
        *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    model=(EMBED, *layer_norm("transformer.ln_f", "transformer.ln_f", place=PipelineStage.LAST), HEAD),
    facts=facts,
    dropped=(".rotary.inv_freq", ".maybe_rotary.inv_freq"),
)
