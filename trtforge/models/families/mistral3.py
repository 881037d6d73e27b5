"""Mistral Small 3.1 and later: the language model is converted, vision tower and projector are copied.

Source: tensorrt_llm/_torch/models/modeling_mistral.py.
"""

from dataclasses import replace

from trtforge.models.families import mistral
from trtforge.models.families.multimodal import language_part

FAMILY = language_part(
    replace(mistral.FAMILY, facts=mistral.same_layers), "mistral3", "Mistral3ForConditionalGeneration"
)
