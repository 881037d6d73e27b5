"""Nemotron (3 and 4): squared ReLU, LayerNorm whose gain is stored as weight + 1, a partial rotary embedding."""

from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families import starcoder2
from trtforge.models.families.common import (
    EMBED,
    HEAD,
    decoder_sizes,
    dense,
    plain_mlp,
    qkv,
    require,
    rotary,
    with_defaults,
)
from trtforge.models.families.gpt2 import gpt_fields
from trtforge.models.family import Facts, PipelineStage, holding, layer_norm


def facts(config: HfConfig) -> Facts:
    """The facts of a Nemotron config.json."""
    require(config, "hidden_act", "relu2", ("relu2",), "TensorRT-LLM's Nemotron has one activation")
    config = with_defaults(config, {"max_position_embeddings": 4096})  # NemotronConfig's
    sizes, bias = decoder_sizes(config), config.flag("attention_bias")
    require(config, "mlp_bias", False, (bias,), "TensorRT-LLM's GPT has biases in attention and MLP, or in neither")
    fields = {
        **gpt_fields("nemotron", bias=bias),
        "hidden_act": "squared-relu",
        "norm_epsilon": config.number("norm_eps", 1e-5, least=0),
        **rotary(config, sizes),
        "rotary_pct": config.partial_rotary(0.5),
    }
    return Facts(
        sizes=sizes,
        tied_embeddings=config.flag("tie_word_embeddings"),
        config=fields,
        holding=holding(qkv_bias=bias, dense_bias=bias, mlp_bias=bias),
    )


FAMILY = replace(
    starcoder2.FAMILY,
    name="nemotron",
    architectures={"NemotronForCausalLM": "NemotronForCausalLM"},
    layer=(
        *layer_norm("input_layernorm", "input_layernorm", plus_one=True),
        qkv(),
        dense(),
        *layer_norm("post_layernorm", "post_attention_layernorm", plus_one=True),
        *plain_mlp("mlp.up_proj", "mlp.down_proj"),
    ),
    model=(EMBED, *layer_norm("transformer.ln_f", "model.norm", place=PipelineStage.LAST, plus_one=True), HEAD),
    facts=facts,
)
