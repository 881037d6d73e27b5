"""Mistral: a Llama with its own head size and, in its first version, a sliding window.

Ministral 3 and Devstral Small 2 multiply queries by their position (`llama_4_scaling_beta`), which no TensorRT-LLM
network of Mistral does (_torch/models/modeling_mistral.py).
"""

from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families import llama
from trtforge.models.families.common import require, sliding_layers, sliding_window, with_defaults
from trtforge.models.family import Facts

_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}  # MistralConfig's


def facts(config: HfConfig) -> Facts:
    """The facts of a Mistral config.json. With `layer_types`, transformers treats it as a Ministral."""
    base = same_layers(config)
    windows = sliding_window(with_defaults(config, _DEFAULTS), sliding_layers(config))
    return replace(base, config={**base.config, **windows})


def same_layers(config: HfConfig) -> Facts:
    """The facts of a Mistral inside another model, where transformers ignores `layer_types`; all layers are alike."""
    config = with_defaults(config, _DEFAULTS)
    scaling = HfConfig(config.rope_scaling or {}, config.path)
    require(scaling, "llama_4_scaling_beta", 0, (0,), "TensorRT-LLM's Mistral does not scale queries by their position")
    base = llama.facts(config)
    return replace(base, config={**base.config, **sliding_window(config)})


FAMILY = replace(
    llama.FAMILY,
    name="mistral",
    architectures={"MistralForCausalLM": "MistralForCausalLM"},
    facts=facts,
)
