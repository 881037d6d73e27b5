"""Mixtral: Mistral with a mixture of experts in every layer (tensorrt_llm/models/llama/convert.py, 0.17).

Which ranks get an expert, and which rows of it: `models.expert_split`.
"""

from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families import mistral
from trtforge.models.families.common import (
    INPUT_NORM,
    POST_NORM,
    dense,
    experts,
    moe_fields,
    qkv,
    router,
    with_defaults,
)
from trtforge.models.family import Facts

_EXPERT = "block_sparse_moe.experts.{}"
LAYER = (
    INPUT_NORM,
    qkv(),
    dense(),
    POST_NORM,
    router("block_sparse_moe.gate"),
    *experts(gate=f"{_EXPERT}.w1", up=f"{_EXPERT}.w3", down=f"{_EXPERT}.w2"),
)

_DEFAULTS = {"rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "sliding_window": None}  # MixtralConfig's


def facts(config: HfConfig) -> Facts:
    """The facts of a Mixtral config.json; its `intermediate_size` is an expert's."""
    config = with_defaults(config, _DEFAULTS)
    base = mistral.same_layers(config)
    count = config.integer("num_local_experts")
    sizes = replace(base.sizes, more={"experts": count, "moe_intermediate": base.sizes.intermediate})
    moe = moe_fields(count, config.integer("num_experts_per_tok"), normalization=1)
    return replace(
        base,
        sizes=sizes,
        config={**base.config, "hidden_act": "swiglu", "moe": moe},
        sparse_layers=frozenset(range(sizes.num_layers)),
    )


FAMILY = replace(
    mistral.FAMILY,
    name="mixtral",
    architectures={"MixtralForCausalLM": "MixtralForCausalLM"},
    layer=LAYER,
    facts=facts,
    modules_renamed={"mlp.gate": "block_sparse_moe.gate"},
)
