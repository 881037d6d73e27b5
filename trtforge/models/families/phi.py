"""Phi-1, 1.5 and 2: parallel attention and MLP after one LayerNorm, biases, a partial rotary embedding."""

from trtforge.formats.hf import HfConfig
from trtforge.models.families.common import (
    EMBED,
    HEAD,
    ROTARY_TABLES,
    activation,
    decoder_sizes,
    dense,
    plain_mlp,
    qkv,
    require,
    rotary,
)
from trtforge.models.family import Facts, Family, HeadBias, PipelineStage, holding, layer_norm


def facts(config: HfConfig) -> Facts:
    """The facts of a Phi config.json."""
    require(config, "qk_layernorm", False, (False,), "TensorRT-LLM's Phi has no query and key norms")
    sizes = decoder_sizes(config)
    fraction = config.partial_rotary(0.5)
    return Facts(
        sizes=sizes,
        tied_embeddings=config.flag("tie_word_embeddings"),
        config={
            "hidden_act": activation(config, "hidden_act"),
            "norm_epsilon": config.number("layer_norm_eps", 1e-5, least=0),
            **rotary(config, sizes, fraction),
            "rotary_pct": fraction,
        },
        holding=holding(qkv_bias=True, dense_bias=True, mlp_bias=True),
    )


FAMILY = Family(
    name="phi",
    architectures={"PhiForCausalLM": "PhiForCausalLM"},
    layer_prefix="model.layers",
    layer=(
        *layer_norm("input_layernorm", "input_layernorm"),
        qkv(),
        dense("self_attn.dense"),
        *plain_mlp("mlp.fc1", "mlp.fc2"),
    ),
    model=(
        EMBED,
        *layer_norm("transformer.ln_f", "model.final_layernorm", place=PipelineStage.LAST),
        HEAD,
        HeadBias("lm_head.bias", "lm_head.bias"),
    ),
    facts=facts,
    dropped=ROTARY_TABLES,
)
