"""OPT: learned positions whose table starts with two unused rows, ReLU (examples/opt/convert_checkpoint.py, 0.17)."""

from trtforge.formats.hf import HfConfig
from trtforge.models.families.common import SELF_ATTENTION, dense, embeddings, plain_mlp, qkv, require, require_causal
from trtforge.models.family import Embedding, Facts, Family, PipelineStage, Sizes, Split, holding, layer_norm

EMBED, HEAD = embeddings("model.decoder.embed_tokens.weight", "lm_head.weight")


def facts(config: HfConfig) -> Facts:
    """The facts of an OPT config.json."""
    require_causal(config)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    require(config, "activation_function", "relu", ("relu",), "TensorRT-LLM's OPT has one activation")
    require(config, "word_embed_proj_dim", hidden, (hidden,), "TensorRT-LLM's OPT has no embedding projection")
    require(config, "layer_norm_elementwise_affine", True, (True,), "TensorRT-LLM's OPT has affine norms only")
    require(config, "enable_bias", True, (True,), "TensorRT-LLM's OPT has biases")
    require(config, "_remove_final_layer_norm", False, (False,), "TensorRT-LLM's OPT has a final norm")
    before = config.flag("do_layer_norm_before", True)
    sizes = Sizes(
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        hidden=hidden,
        intermediate=config.integer("ffn_dim"),
        vocab=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings", 2048),
    )
    return Facts(
        sizes=sizes,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        config={
            "hidden_act": "relu",
            "norm_epsilon": 1e-5,
            "position_embedding_type": "learned_absolute",
            "do_layer_norm_before": before,
        },
        holding=holding(qkv_bias=True, dense_bias=True, mlp_bias=True, final_norm=before),
    )


FAMILY = Family(
    name="opt",
    architectures={"OPTForCausalLM": "OPTForCausalLM"},
    layer_prefix="model.decoder.layers",
    layer=(
        *layer_norm("input_layernorm", "self_attn_layer_norm"),
        qkv(SELF_ATTENTION),
        dense("self_attn.out_proj"),
        *layer_norm("post_layernorm", "final_layer_norm"),
        *plain_mlp("fc1", "fc2"),
    ),
    model=(
        EMBED,
        Embedding(
            "transformer.position_embedding.weight",
            "model.decoder.embed_positions.weight",
            Split.REPLICATE,
            PipelineStage.FIRST,
            rows="positions",
            skip=2,
        ),
        *layer_norm("transformer.ln_f", "model.decoder.final_layer_norm", place=PipelineStage.LAST, when="final_norm"),
        HEAD,
    ),
    facts=facts,
)
