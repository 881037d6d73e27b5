"""GPT-J: parallel attention and MLP after one norm, GPT-J rotary style, an LM head with bias.

Source: tensorrt_llm/models/gptj/convert.py (0.17). The all-reduce sums the MLP's bias, so only rank 0 holds it.
"""

from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families.common import (
    dense,
    embeddings,
    gpt2_sizes,
    plain_mlp,
    qkv,
    require,
    require_rotated,
    rotary,
)
from trtforge.models.family import Facts, Family, HeadBias, Part, PipelineStage, holding, layer_norm

EMBED, HEAD = embeddings("transformer.wte.weight", "lm_head.weight")
_QKV = (Part("attn.q_proj", "q"), Part("attn.k_proj", "kv"), Part("attn.v_proj", "kv"))
_FC, _PROJ = plain_mlp("mlp.fc_in", "mlp.fc_out")


def facts(config: HfConfig) -> Facts:
    """The facts of a GPT-J config.json. TensorRT-LLM's gelu is the tanh approximation."""
    why = "TensorRT-LLM's GPT-J has the tanh approximation of GELU only"
    require(config, "activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), why)
    sizes = gpt2_sizes(config)
    rotated = config.integer("rotary_dim", 64)
    require_rotated(config, rotated, sizes)
    return Facts(
        sizes=sizes,
        tied_embeddings=config.flag("tie_word_embeddings"),
        config={
            "hidden_act": "gelu",
            "norm_epsilon": config.number("layer_norm_epsilon", 1e-5, least=0),
            **rotary(_with_its_rotation(config), sizes, style="rope_gptj"),
            "rotary_dim": rotated,
        },
        holding=holding(mlp_bias=True),
    )


def _with_its_rotation(config: HfConfig) -> HfConfig:
    """The config.json without keys that transformers' GPT-J, whose base is 10,000, does not read."""
    others = ("rope_theta", "rope_scaling", "rope_parameters")
    return HfConfig({key: value for key, value in config.values.items() if key not in others}, config.path)


FAMILY = Family(
    name="gptj",
    architectures={"GPTJForCausalLM": "GPTJForCausalLM"},
    layer_prefix="transformer.h",
    layer=(
        *layer_norm("input_layernorm", "ln_1"),
        qkv(_QKV, bias=None),
        dense("attn.out_proj", bias=None),
        _FC,
        replace(_PROJ, zero_bias=True),
    ),
    model=(
        EMBED,
        *layer_norm("transformer.ln_f", "transformer.ln_f", place=PipelineStage.LAST),
        HEAD,
        HeadBias("lm_head.bias", "lm_head.bias"),
    ),
    facts=facts,
    dropped=(".attn.bias", ".attn.masked_bias"),
)
