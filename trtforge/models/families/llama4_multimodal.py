"""Llama 4 as published, with vision: the language model is converted, vision model and projector are copied.

Source: tensorrt_llm/_torch/models/modeling_llama.py, Llama4ForConditionalGeneration.
"""

from trtforge.models.families import llama4
from trtforge.models.families.multimodal import language_part

FAMILY = language_part(llama4.FAMILY, "llama4_multimodal", "Llama4ForConditionalGeneration", ("llama4_text",))
