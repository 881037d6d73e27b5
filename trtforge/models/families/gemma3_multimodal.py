"""Gemma 3 with vision (4B and larger): the language model is converted, vision tower and projector are copied.

Source: tensorrt_llm/_torch/models/modeling_gemma3vl.py.
"""

from trtforge.models.families import gemma3
from trtforge.models.families.multimodal import language_part

FAMILY = language_part(gemma3.FAMILY, "gemma3_multimodal", "Gemma3ForConditionalGeneration")
