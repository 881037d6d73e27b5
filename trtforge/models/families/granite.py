"""Granite: a Llama with four constant multipliers (tensorrt_llm/models/llama/config.py, after 0.17)."""

import math
from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families import llama
from trtforge.models.family import Facts


def facts(config: HfConfig) -> Facts:
    """The facts of a Granite config.json. TensorRT-LLM's attention multiplier is relative to 1 / sqrt(head size)."""
    base = llama.facts(config)
    attention = config.number("attention_multiplier", 1.0)
    multipliers = {
        "embedding_multiplier": config.number("embedding_multiplier", 1.0),
        "attention_multiplier": attention * math.sqrt(base.sizes.head_size),
        "residual_multiplier": config.number("residual_multiplier", 1.0),
        "output_multiplier_scale": 1.0 / config.number("logits_scaling", 1.0, above=0),
    }
    return replace(base, config={**base.config, **multipliers})


FAMILY = replace(
    llama.FAMILY,
    name="granite",
    architectures={"GraniteForCausalLM": "GraniteForCausalLM"},
    facts=facts,
)
