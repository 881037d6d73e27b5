"""Notes on a foreign checkpoint: facts that its manifest does not prove, and differences between its config.json and
the model's."""

from pathlib import Path

from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.family import Facts

_FIELDS = ("rotary_base", "norm_epsilon")
"""Numbers in config.json that change every logit but that no tensor's shape shows."""


def source_note(candidate: Path) -> str:
    """The note that the source of a foreign checkpoint is not recorded."""
    return (
        f"{candidate} is foreign: the digests of its source are not recorded, so only its sizes, its tensors and its "
        "logits tell which model it is"
    )


def differing_fields(config: CheckpointConfig, facts: Facts) -> tuple[str, ...]:
    """A sentence for each of these fields that differs from the model's."""
    found = []
    for key in _FIELDS:
        own, model = getattr(config, key), facts.config.get(key)
        if isinstance(model, int | float) and float(own) != float(model):
            origin = "" if key in config.model_fields_set else ", the default, as its config.json has none"
            found.append(f"its {key} is {own:g}{origin}; the model's is {model:g}")
    scaling = facts.config.get("rotary_scaling")
    if scaling and not config.rotary_scaling:
        found.append(f"its config.json has no rotary_scaling; the model's is {dict(scaling)}")
    return tuple(found)
