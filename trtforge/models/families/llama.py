"""Llama 2, 3 and 3.x: grouped-query attention, gated MLP, RMSNorm, rotary positions with every HF scaling.

Names: tensorrt_llm/models/llama/convert.py and config.py (0.17). TensorRT-LLM calls HF's gate_proj `fc` and HF's
up_proj `gate`. Its converter loses `mlp_bias`, which its network has: we write those biases.
"""

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfConfig
from trtforge.models.family import Embedding, Facts, Family, Linear, Part, Place, Sizes, Split, Vector

LAYER = (
    Vector("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    Linear(
        "attention.qkv",
        (Part("self_attn.q_proj", "q"), Part("self_attn.k_proj", "kv"), Part("self_attn.v_proj", "kv")),
        inputs="hidden",
        split=Split.HEADS,
        bias="attn_bias",
    ),
    Linear("attention.dense", (Part("self_attn.o_proj", "hidden"),), "q", Split.ROW, bias="attn_bias"),
    Vector("post_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
    Linear("mlp.fc", (Part("mlp.gate_proj", "intermediate"),), "hidden", Split.COLUMN, bias="mlp_bias"),
    Linear(
        "mlp.gate",
        (Part("mlp.up_proj", "intermediate"),),
        inputs="hidden",
        split=Split.COLUMN,
        bias="mlp_bias",
        shares_scale="mlp.fc",
        shares_input="mlp.fc",
    ),
    Linear("mlp.proj", (Part("mlp.down_proj", "hidden"),), "intermediate", Split.ROW, bias="mlp_bias"),
)

MODEL = (
    Embedding("transformer.vocab_embedding.weight", "model.embed_tokens.weight", Split.EMBEDDING, Place.FIRST),
    Vector("transformer.ln_f.weight", "model.norm.weight", "hidden", Place.LAST),
    Embedding("lm_head.weight", "lm_head.weight", Split.VOCAB, Place.LAST, tied="model.embed_tokens.weight"),
)


def facts(config: HfConfig) -> Facts:
    """The facts of a Llama config.json. Raises ForgeError for an activation that TensorRT-LLM's Llama lacks."""
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    activation = str(config.values.get("hidden_act", "silu"))
    if activation != "silu":
        raise ForgeError(
            f"{config.path}: hidden_act {activation} is not a Llama's", hint="Only the gated SiLU MLP is converted."
        )
    sizes = Sizes(
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_size=config.integer("head_dim", hidden // heads),
        hidden=hidden,
        intermediate=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings", 2048),
    )
    attn_bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    return Facts(
        sizes=sizes,
        attn_bias=attn_bias,
        mlp_bias=mlp_bias,
        tied_embeddings=config.flag("tie_word_embeddings"),
        config={
            "hidden_act": activation,
            "norm_epsilon": config.number("rms_norm_eps", 1e-6),
            "position_embedding_type": "rope_gpt_neox",
            "rotary_base": config.rope_theta,
            "rotary_scaling": config.rope_scaling,
            "rotary_embedding_dim": sizes.head_size,
            "attn_bias": attn_bias,
            "mlp_bias": mlp_bias,
        },
    )


FAMILY = Family(
    name="llama",
    architectures={"LlamaForCausalLM": "LlamaForCausalLM"},
    layer_prefix="model.layers",
    layer=LAYER,
    model=MODEL,
    dropped=("self_attn.rotary_emb.inv_freq",),
    facts=facts,
)
