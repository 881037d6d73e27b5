"""Draft heads that become part of a checkpoint: their files, their tensors in the rank files, and config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.features import MedusaFeature
from trtforge.core.watch import Watch
from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.medusa import MEDUSA_DIRECTORY, MEDUSA_FILE, read_medusa
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.checkpoint_plan import CheckpointPlan, Layout
from trtforge.models.content import pieces_of
from trtforge.models.family import Facts
from trtforge.models.medusa_plan import converted_heads, medusa_targets, with_medusa
from trtforge.plan.speculation import BASES


@dataclass(frozen=True)
class Heads:
    """What is converted with the model. `files`: by their names among the inputs of the checkpoint.

    `settings`: what was asked for, without paths, for the checkpoint's identity.
    """

    files: Mapping[str, Path]
    settings: dict[str, Any]
    watch: Watch

    def digests(self, source: HfCheckpoint) -> dict[str, str]:
        """The digest of each file, from the bytes that were read as part of `source`. Raises ForgeError for a file that
        changed meanwhile."""
        self.watch.require_unchanged(self.files.values())
        return {name: source.contents.of_file(path) for name, path in self.files.items()}


def heads_settings(medusa: MedusaFeature | None) -> dict[str, Any]:
    """What a checkpoint's manifest says of the heads that were asked for; nothing without."""
    if medusa is None:
        return {}
    return {"medusa": medusa.model_dump(mode="json", include={"draft_tokens", "heads", "layers"})}


def add_medusa(
    medusa: MedusaFeature,
    checkpoint: HfCheckpoint,
    facts: Facts,
    layout: Layout,
    plan: CheckpointPlan,
    description: CheckpointConfig,
) -> tuple[Heads, HfCheckpoint, CheckpointPlan, CheckpointConfig]:
    """The heads, and source, plan and config.json with them.

    Raises ForgeError for a model for which TensorRT-LLM has no Medusa, and for heads of another model.
    """
    if checkpoint.config.architecture not in BASES["medusa"]:
        raise ForgeError(
            f"engine.features.medusa: TensorRT-LLM has medusa for {', '.join(BASES['medusa'])}, not for "
            f"{checkpoint.config.architecture}",
            hint="Convert the model alone; the torch backend takes heads for it with --feature medusa.model=HEADS.",
        )
    directory = Path(medusa.model or "")
    watch = Watch(directory)
    found = read_medusa(directory, facts.sizes.hidden, facts.sizes.vocab)
    targets = tuple(medusa_targets(found, converted_heads(medusa, found), facts.sizes, layout))
    sources = {piece.source: piece.shape for target in targets for piece in pieces_of(target.content)}
    assert not sources.keys() & checkpoint.tensors.keys(), "names of the heads' tensors begin with a number"
    heads = Heads({f"{MEDUSA_DIRECTORY}/{MEDUSA_FILE}": directory / MEDUSA_FILE}, heads_settings(medusa), watch)
    return (
        heads,
        replace(checkpoint, tensors={**checkpoint.tensors, **found.tensors}),
        replace(plan, targets=(*plan.targets, *targets), sources=plan.sources | sources),
        with_medusa(description, checkpoint.config, medusa, found),
    )
