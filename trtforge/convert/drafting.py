"""Draft heads and networks that become part of a checkpoint: their files, their tensors and config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtforge.core.digest import file_digest
from trtforge.core.errors import ForgeError
from trtforge.core.features import Drafting, MedusaFeature
from trtforge.core.watch import Watch
from trtforge.formats.eagle import EAGLE_DIRECTORY
from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.medusa import MEDUSA_DIRECTORY, MEDUSA_FILE, read_medusa
from trtforge.formats.shards import StoredTensor
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.checkpoint_plan import CheckpointPlan, Layout
from trtforge.models.content import Target, pieces_of
from trtforge.models.eagle_plan import (
    eagle_targets,
    network_facts,
    network_family,
    network_for,
    network_layout,
    networks_of,
    stored_tensors,
    with_eagle,
)
from trtforge.models.family import Facts
from trtforge.models.medusa_plan import converted_heads, medusa_targets, with_medusa
from trtforge.plan.legality import require_legal
from trtforge.plan.speculation import BASES


@dataclass(frozen=True)
class Drafters:
    """Medusa heads or an EAGLE network to convert with the model. `files`: by name among the checkpoint's inputs.

    `settings`: their options without paths, for the checkpoint's identity.
    """

    files: Mapping[str, Path]
    settings: dict[str, Any]
    watch: Watch

    def digests(self) -> dict[str, str]:
        """The digest of each file. Raises ForgeError for a file that changed since it was opened."""
        self.watch.require_unchanged(self.files.values())
        return {name: file_digest(path) for name, path in self.files.items()}


@dataclass(frozen=True)
class Drafted:
    """A conversion with heads or a network: the source with their tensors, the plan with their targets, and
    config.json."""

    drafters: Drafters
    checkpoint: HfCheckpoint
    plan: CheckpointPlan
    description: CheckpointConfig


def drafting_settings(drafting: Drafting | None) -> dict[str, Any]:
    """The entry of a checkpoint's manifest for Medusa heads or an EAGLE network; empty without them."""
    if drafting is None:
        return {}
    if isinstance(drafting, MedusaFeature):
        return {"medusa": drafting.model_dump(mode="json", include={"draft_tokens", "heads", "layers"})}
    return {"eagle": {"draft_tokens": drafting.draft_tokens, "networks": networks_of(drafting)}}


def add_drafting(
    drafting: Drafting,
    checkpoint: HfCheckpoint,
    facts: Facts,
    layout: Layout,
    plan: CheckpointPlan,
    description: CheckpointConfig,
) -> Drafted:
    """The conversion with heads or a network.

    Raises ForgeError if TensorRT-LLM lacks the method for the model, or if the heads or network are of another model.
    """
    name = "medusa" if isinstance(drafting, MedusaFeature) else "eagle"
    bases = BASES["medusa"] if isinstance(drafting, MedusaFeature) else BASES["eagle"]
    if checkpoint.config.architecture not in bases:
        raise ForgeError(
            f"engine.features.{name}: TensorRT-LLM has {name} for {', '.join(bases)}, not for "
            f"{checkpoint.config.architecture}",
            hint=f"Convert the model alone; the torch backend supports it with --feature {name}.model=DIRECTORY.",
        )
    directory = Path(drafting.model or "")
    watch = Watch(directory)
    tensors: Mapping[str, StoredTensor]
    if isinstance(drafting, MedusaFeature):
        heads = read_medusa(directory, facts.sizes.hidden, facts.sizes.vocab)
        targets = tuple(medusa_targets(heads, converted_heads(drafting, heads), facts.sizes, layout))
        description = with_medusa(description, checkpoint.config, drafting, heads)
        tensors, files = heads.tensors, {f"{MEDUSA_DIRECTORY}/{MEDUSA_FILE}": directory / MEDUSA_FILE}
    else:
        network = network_for(drafting, description)
        require_legal(network_family(), network_facts(network), network_layout(layout.parallel.tp, layout.dtype))
        targets = tuple(eagle_targets(plan, network, layout, networks_of(drafting)))
        description = with_eagle(description, drafting, network)
        tensors = stored_tensors(network)
        files = {f"{EAGLE_DIRECTORY}/{path.name}": path for path in network.files}
    assert not tensors.keys() & checkpoint.tensors.keys(), "no model has tensors of these names"
    return Drafted(
        Drafters(files, drafting_settings(drafting), watch),
        replace(checkpoint, tensors={**checkpoint.tensors, **tensors}),
        replace(plan, targets=(*plan.targets, *targets), sources=plan.sources | _sources(targets)),
        description,
    )


def _sources(targets: tuple[Target, ...]) -> dict[str, tuple[int, ...]]:
    return {piece.source: piece.shape for target in targets for piece in pieces_of(target.content)}
