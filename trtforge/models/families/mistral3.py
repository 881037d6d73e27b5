"""Mistral Small 3.1 and later: the language model is converted, vision tower and projector are copied.

Source: tensorrt_llm/_torch/models/modeling_mistral.py.
"""

from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families import mistral
from trtforge.models.families.common import with_defaults
from trtforge.models.families.multimodal import language_part
from trtforge.models.family import Facts

_MISTRAL, _MINISTRAL = "mistral", "ministral3"
_DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "llama_4_scaling_beta": 0.1},
}
"""Ministral3Config's defaults that differ from MistralConfig's; of the RoPE parameters, those that are refused."""


def _facts(text: HfConfig) -> Facts:
    """The facts of a text_config."""
    ministral = text.values.get("model_type") == _MINISTRAL
    return mistral.same_layers(with_defaults(text, _DEFAULTS) if ministral else text)


FAMILY = language_part(
    replace(mistral.FAMILY, facts=_facts), "mistral3", "Mistral3ForConditionalGeneration", (_MISTRAL, _MINISTRAL)
)
