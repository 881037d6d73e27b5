"""GPT-OSS: experts with biases and a clamped gate, attention sinks, sliding windows in every other layer.

Only TensorRT-LLM's PyTorch backend runs it (_torch/models/modeling_gpt_oss.py), from the published checkpoint. This
table has what planning needs; nothing is converted, so the experts' stacked tensors and the sinks have no rows.
"""

from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families import llama
from trtforge.models.families.common import (
    EXPERT,
    INPUT_NORM,
    POST_NORM,
    dense,
    experts,
    moe_fields,
    qkv,
    router,
    sliding_layers,
    sliding_window,
)
from trtforge.models.family import Facts, holding

_NORMALISED = 1  # weights of the chosen experts sum to 1


def facts(config: HfConfig) -> Facts:
    """The facts of a GPT-OSS config.json."""
    base = llama.facts(config)
    count, inner = config.integer("num_local_experts"), config.integer("intermediate_size")
    return replace(
        base,
        sizes=replace(base.sizes, more={"experts": count, "moe_intermediate": inner}),
        config={
            **base.config,
            "moe": moe_fields(count, config.integer("num_experts_per_tok"), _NORMALISED),
            **sliding_window(config, sliding_layers(config)),
        },
        holding=holding(qkv_bias=True, dense_bias=True),
        sparse_layers=frozenset(range(base.sizes.num_layers)),
    )


FAMILY = replace(
    llama.FAMILY,
    name="gpt_oss",
    architectures={"GptOssForCausalLM": "GptOssForCausalLM"},
    layer=(
        INPUT_NORM,
        replace(qkv(), quantized=False),
        replace(dense(), quantized=False),
        POST_NORM,
        router("mlp.router"),
        *experts(gate=f"{EXPERT}.gate_proj", up=f"{EXPERT}.up_proj", down=f"{EXPERT}.down_proj"),
    ),
    facts=facts,
    engines=False,
)
