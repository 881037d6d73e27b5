"""Names of tensors as models are published with them, from those that transformers gives its own modules.

transformers saves a model under the former, but other programs save the state of its modules: from 4.52 on the parts of
a model with vision are below one `model`, from 5 on Mixtral's experts are in `mlp` and GPT-NeoX has an `lm_head`. Both
are read alike. Source: transformers 5.23, conversion_mapping.py ("llava", "mixtral", "GPTNeoXForCausalLM").
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
    """The name under which models of an architecture are published."""
    for pattern, published in _PUBLISHED.get(architecture, ()):
        name = re.sub(pattern, published, name)
    return name


def module_names(published: str) -> tuple[str, ...]:
    """The names that a module of a language model may have in the description of a quantisation, its own first.

    A description in the text_config of a model with vision has those of the language model alone.
    """
    below = "language_model.model."
    if not published.startswith(below):
        return (published,)
    module = published.removeprefix(below)
    return published, f"model.language_model.{module}", f"model.{module}"
