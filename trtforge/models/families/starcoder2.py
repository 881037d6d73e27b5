"""StarCoder2: GPT with rotary positions, grouped-query attention and a sliding window (tensorrt_llm/models/gpt)."""

from trtforge.formats.hf import HfConfig
from trtforge.models.families.common import (
    EMBED,
    HEAD,
    ROTARY_TABLES,
    decoder_sizes,
    dense,
    plain_mlp,
    qkv,
    require,
    rotary,
    sliding_window,
    with_defaults,
)
from trtforge.models.families.gpt2 import gpt_fields
from trtforge.models.family import Facts, Family, PipelineStage, holding, layer_norm

_DEFAULTS = {"num_key_value_heads": 2, "max_position_embeddings": 4096}  # Starcoder2Config's


def facts(config: HfConfig) -> Facts:
    """The facts of a StarCoder2 config.json. TensorRT-LLM's gelu is the tanh approximation."""
    require(config, "hidden_act", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",), "TensorRT-LLM supports one activation")
    config = with_defaults(config, _DEFAULTS)
    sizes, bias = decoder_sizes(config), config.flag("use_bias", True)
    return Facts(
        sizes=sizes,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        config={
            **gpt_fields("starcoder2", bias=bias),
            "hidden_act": "gelu",
            "norm_epsilon": config.number("norm_epsilon", 1e-5, least=0),
            **rotary(config, sizes),
            **sliding_window(config),
        },
        holding=holding(qkv_bias=bias, dense_bias=bias, mlp_bias=bias),
    )


FAMILY = Family(
    name="starcoder2",
    architectures={"Starcoder2ForCausalLM": "Starcoder2ForCausalLM"},
    layer_prefix="model.layers",
    layer=(
        *layer_norm("input_layernorm", "input_layernorm"),
        qkv(),
        dense(),
        *layer_norm("post_layernorm", "post_attention_layernorm"),
        *plain_mlp("mlp.c_fc", "mlp.c_proj"),
    ),
    model=(EMBED, *layer_norm("transformer.ln_f", "model.norm", place=PipelineStage.LAST), HEAD),
    facts=facts,
    dropped=ROTARY_TABLES,
)
