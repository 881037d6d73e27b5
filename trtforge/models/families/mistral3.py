"""Mistral Small 3.1 and later: the language model is converted, vision tower and projector are copied.

Source: tensorrt_llm/_torch/models/modeling_mistral.py.
"""

from trtforge.models.families import mistral
from trtforge.models.families.multimodal import language_part

FAMILY = language_part(mistral.FAMILY, "mistral3", "Mistral3ForConditionalGeneration")
