"""The language model inside a multimodal checkpoint, whose other tensors are copied into an LLM API model."""

from dataclasses import replace

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfConfig
from trtforge.models.families.common import require
from trtforge.models.family import Embedding, Facts, Family, Row, Vector

NESTED = "language_model."
VISION = ("vision_tower.", "vision_model.", "multi_modal_projector.")


def language_part(base: Family, name: str, architecture: str, text_types: tuple[str, ...]) -> Family:
    """`base` under the names of a multimodal checkpoint. Only TensorRT-LLM's PyTorch backend runs the whole.

    `text_types`: the possible `model_type` values of a text_config; the first is the default.
    """

    def facts(config: HfConfig) -> Facts:
        """The facts of its text_config; whether the LM head is tied comes from the whole model's config, because that
        has the head."""
        text = config.values.get("text_config")
        if not isinstance(text, dict):
            raise ForgeError(f"{config.path}: text_config is {text!r:.60}, not an object", hint="Fetch the file again.")
        why = f"TensorRT-LLM's {architecture} has another language model"
        require(HfConfig(text, config.path), "model_type", text_types[0], text_types, why)
        tied = config.values.get("tie_word_embeddings", text.get("tie_word_embeddings"))
        values = {**text, "tie_word_embeddings": tied, "architectures": [architecture]}
        return base.facts(HfConfig(values, config.path))

    return replace(
        base,
        name=name,
        architectures={architecture: architecture},
        layer_prefix=NESTED + base.layer_prefix,
        model=tuple(_nested(row) for row in base.model),
        facts=facts,
        engines=False,
        carried=VISION,
        nested=NESTED,
    )


def _nested(row: Row) -> Row:
    if isinstance(row, Embedding):
        return replace(row, source=NESTED + row.source, tied=NESTED + row.tied if row.tied else None)
    assert isinstance(row, Vector), row
    return replace(row, source=NESTED + row.source)
