"""Bloom: ALiBi, a LayerNorm after the embedding, per-head [q k v] (examples/bloom/convert_checkpoint.py, 0.17)."""

from trtforge.formats.hf import HfConfig
from trtforge.models.families.common import dense, embeddings, fused_qkv, plain_mlp, qkv, require, require_causal
from trtforge.models.family import Facts, Family, PipelineStage, Sizes, holding, layer_norm

EMBED, HEAD = embeddings("transformer.word_embeddings.weight", "lm_head.weight")


def facts(config: HfConfig) -> Facts:
    """The facts of a Bloom config.json. TensorRT-LLM's gelu is the tanh approximation, as is Bloom's."""
    require_causal(config)
    why = "TensorRT-LLM's Bloom adds the residual before the norm"
    require(config, "apply_residual_connection_post_layernorm", False, (False,), why)
    hidden = config.integer("hidden_size", config.values.get("n_embed"))
    heads = config.integer("n_head", config.values.get("num_attention_heads"))
    sizes = Sizes(
        num_layers=config.integer("n_layer", config.values.get("num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        hidden=hidden,
        intermediate=4 * hidden,
        vocab=config.integer("vocab_size"),
        max_positions=config.integer("seq_length", 2048),
    )
    return Facts(
        sizes=sizes,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        config={
            "hidden_act": "gelu",
            "norm_epsilon": config.number("layer_norm_epsilon", 1e-5, least=0),
            "position_embedding_type": "alibi",
        },
        holding=holding(qkv_bias=True, dense_bias=True, mlp_bias=True),
    )


FAMILY = Family(
    name="bloom",
    architectures={"BloomForCausalLM": "BloomForCausalLM"},
    layer_prefix="transformer.h",
    layer=(
        *layer_norm("input_layernorm", "input_layernorm"),
        qkv(fused_qkv("self_attention.query_key_value", "grouped")),
        dense("self_attention.dense"),
        *layer_norm("post_layernorm", "post_attention_layernorm"),
        *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    model=(
        EMBED,
        *layer_norm("transformer.ln_embed", "transformer.word_embeddings_layernorm", place=PipelineStage.FIRST),
        *layer_norm("transformer.ln_f", "transformer.ln_f", place=PipelineStage.LAST),
        HEAD,
    ),
    facts=facts,
    base_prefix="transformer.",
)
