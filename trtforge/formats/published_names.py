"""Maps tensor names of transformers' modules to the names in published models.

transformers saves models with published names, but other programs save the modules' state: since 4.52 the parts of
vision models are below one `model`, since 5 Mixtral's experts are in `mlp` and GPT-NeoX has an `lm_head`. Both are
accepted. Source: transformers 5.23, conversion_mapping.py ("llava", "mixtral", "GPTNeoXForCausalLM").
"""

import re

_WITH_VISION = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^model\.(?=vision_tower\.|multi_modal_projector\.)", ""),
    (r"^lm_head\.", "language_model.lm_head."),
)
_PUBLISHED = {
    "Gemma3ForConditionalGeneration": _WITH_VISION,
    "Mistral3ForConditionalGeneration": _WITH_VISION,
    "GPTNeoXForCausalLM": ((r"^lm_head\.", "embed_out."),),
    "MixtralForCausalLM": ((r"\.mlp\.", ".block_sparse_moe."),),
}


def published_name(name: str, architecture: str) -> str:
    """The tensor's name in published models of an architecture."""
    for pattern, published in _PUBLISHED.get(architecture, ()):
        name = re.sub(pattern, published, name)
    return name


def module_names(published: str) -> tuple[str, ...]:
    """The possible names of a language model's module in a quantisation description, its own name first.

    A description in the text_config of a vision model has the names within the language model.
    """
    below = "language_model.model."
    if not published.startswith(below):
        return (published,)
    module = published.removeprefix(below)
    return published, f"model.language_model.{module}", f"model.{module}"
