"""Gemma 3 with vision (4B and larger): the language model is converted, vision tower and projector are copied.

Source: tensorrt_llm/_torch/models/modeling_gemma3vl.py.
"""

from dataclasses import replace

from trtforge.formats.hf import HfConfig
from trtforge.models.families import gemma3
from trtforge.models.families.common import require
from trtforge.models.families.multimodal import language_part
from trtforge.models.family import Facts


def _facts(text: HfConfig) -> Facts:
    """The facts of a text_config. Raises ForgeError for soft-capped logits, which transformers applies only in
    Gemma3ForCausalLM (Gemma3ForConditionalGeneration in modeling_gemma3.py, 5.23)."""
    require(text, "final_logit_softcapping", None, (None,), "Gemma 3 with vision has no capped logits")
    return gemma3.facts(text)


FAMILY = language_part(
    replace(gemma3.FAMILY, facts=_facts), "gemma3_multimodal", "Gemma3ForConditionalGeneration", ("gemma3_text",)
)
