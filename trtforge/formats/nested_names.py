"""Names of the tensors of a model with vision: transformers 4.52 and later have its parts below one `model`.

They save a model under the names that it was published with, but other programs save the names of its modules; both are
read alike. Source: transformers 5.23, conversion_mapping.py ("llava").
"""

_RENAMED = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
_PUBLISHED = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}


def published_name(name: str, architecture: str) -> str:
    """The name under which models of an architecture are published."""
    if architecture in _RENAMED:
        for prefix, published in _PUBLISHED.items():
            if name.startswith(prefix):
                return published + name.removeprefix(prefix)
    return name


def module_names(published: str) -> tuple[str, ...]:
    """The names that a module of a language model may have in the description of a quantisation, its own first."""
    below = "language_model.model."
    if not published.startswith(below):
        return (published,)
    return published, "model.language_model." + published.removeprefix(below)
