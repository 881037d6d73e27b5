"""GPT-NeoX (Pythia, Dolly): per-head [q k v], parallel attention and MLP with a norm each, partial rotary.

Source: examples/gptneox/convert_checkpoint.py (0.17), which keeps HF's name for the second norm.
"""

from trtforge.formats.hf import HfConfig
from trtforge.models.families.common import decoder_sizes, dense, embeddings, fused_qkv, plain_mlp, qkv, require, rotary
from trtforge.models.family import Facts, Family, PipelineStage, holding, layer_norm

EMBED, HEAD = embeddings("gpt_neox.embed_in.weight", "embed_out.weight")


def facts(config: HfConfig) -> Facts:
    """The facts of a GPT-NeoX config.json."""
    why = "TensorRT-LLM's GPT-NeoX has GELU only"
    require(config, "hidden_act", "gelu", ("gelu", "gelu_fast", "gelu_new"), why)
    require(config, "attention_bias", True, (True,), "TensorRT-LLM's GPT-NeoX has biases")
    base = config.values.get("rotary_emb_base")
    if base is not None:
        config = HfConfig({"rope_theta": base, **config.values}, config.path)
    sizes = decoder_sizes(config)
    fraction = config.partial_rotary(config.number("rotary_pct", 0.25))
    return Facts(
        sizes=sizes,
        tied_embeddings=config.flag("tie_word_embeddings"),
        config={
            "hidden_act": str(config.values.get("hidden_act", "gelu")),
            "norm_epsilon": config.number("layer_norm_eps", 1e-5, least=0),
            **rotary(config, sizes, fraction),
            "rotary_emb_base": config.rope_theta,
            "rotary_pct": fraction,
            "use_parallel_residual": config.flag("use_parallel_residual", True),
            "attn_bias": True,
        },
        holding=holding(qkv_bias=True, dense_bias=True, mlp_bias=True),
    )


FAMILY = Family(
    name="gpt_neox",
    architectures={"GPTNeoXForCausalLM": "GPTNeoXForCausalLM"},
    layer_prefix="gpt_neox.layers",
    layer=(
        *layer_norm("input_layernorm", "input_layernorm"),
        qkv(fused_qkv("attention.query_key_value", "grouped")),
        dense("attention.dense"),
        *layer_norm("post_attention_layernorm", "post_attention_layernorm"),
        *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    model=(EMBED, *layer_norm("transformer.ln_f", "gpt_neox.final_layer_norm", place=PipelineStage.LAST), HEAD),
    facts=facts,
    dropped=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
)
