"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with multi-query attention and matrices stored (out, in)."""

from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families import gpt2
from trtforge.models.families.common import dense, fused_qkv, gpt2_sizes, plain_mlp, qkv, with_defaults
from trtforge.models.family import Facts, holding, layer_norm

_DEFAULTS = {"activation_function": "gelu_pytorch_tanh"}  # GPTBigCodeConfig's


def facts(config: HfConfig) -> Facts:
    """The facts of a GPT-BigCode config.json. Without multi-query attention, rows are per-head [q k v]."""
    config = with_defaults(config, _DEFAULTS)
    return Facts(
        sizes=gpt2_sizes(config, kv_heads=1 if config.flag("multi_query", True) else None),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        config=gpt2.learned(config, "starcoder"),
        holding=holding(qkv_bias=True, dense_bias=True, mlp_bias=True),
    )


FAMILY = replace(
    gpt2.FAMILY,
    name="gpt_bigcode",
    architectures={"GPTBigCodeForCausalLM": "GPTBigCodeForCausalLM"},
    layer=(
        *layer_norm("input_layernorm", "ln_1"),
        qkv(fused_qkv("attn.c_attn", "grouped")),
        dense("attn.c_proj"),
        *layer_norm("post_layernorm", "ln_2"),
        *plain_mlp("mlp.c_fc", "mlp.c_proj"),
    ),
    facts=facts,
)
