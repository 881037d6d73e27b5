"""Ranks linear layers by quantisation error: each alone is quantised in the reference model, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtforge.core.manifest import open_artifact
from trtforge.core.progress import Progress, Silent
from trtforge.core.recipe import GateConfig
from trtforge.formats.corpus import token_windows
from trtforge.formats.hf import open_checkpoint
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.models.checkpoint_config import layout_of_checkpoint
from trtforge.models.checkpoint_plan import checkpoint_plan
from trtforge.models.exclusions import inseparable
from trtforge.models.registry import family_of_checkpoint
from trtforge.reference.hidden import HiddenStates
from trtforge.verify.reference import stream_reference
from trtforge.verify.result import Damage
from trtforge.verify.substitution import Substitution

_WINDOWS = 8  # of the gate's data: enough for a ranking


def rank_linears(
    candidate: Path, reference: Path, gate: GateConfig, *, progress: Progress | None = None
) -> tuple[Damage, ...]:
    """The linear layers of a one-rank checkpoint that can be left unquantised, largest error first.

    Layers that share a scale are measured together. Experts are skipped, because they cannot be excluded. Raises
    ForgeError for a damaged checkpoint and for unusable data.
    """
    open_artifact(candidate, "checkpoint")
    config, source = read_checkpoint_config(candidate), open_checkpoint(reference)
    family, layout = family_of_checkpoint(source), layout_of_checkpoint(config)
    assert layout is not None, "a checkpoint that trtforge wrote"
    assert layout.parallel.world_size == 1, "one rank holds whole matrices"
    facts = family.facts(source.config)
    substitution = Substitution(candidate, checkpoint_plan(family, facts, layout))
    windows = token_windows(
        gate.data,
        reference,
        samples=min(gate.samples, _WINDOWS),
        length=gate.sequence_length,
        vocab_size=config.vocab_size,
        seed=0,
        part="held_out",
    ).windows
    by_layer: dict[int, list[_Group]] = {}
    for names in inseparable(family, facts):
        if all(map(substitution.takes, names)):
            layer = int(names[0].removeprefix(f"{family.layer_prefix}.").partition(".")[0])
            by_layer.setdefault(layer, []).append(_Group(names))
    batches = [torch.tensor([list(window)]) for window in windows]
    shapes = [(1, len(window)) for window in windows]
    states = HiddenStates(shapes, facts.sizes.hidden, torch.float32, torch.device("cpu"))
    stream = stream_reference(source)
    try:
        with torch.inference_mode(), (progress or Silent()).bar("Ranking", facts.sizes.num_layers, "layers") as bar:
            for loaded in stream.layers(batches, states):
                inputs = [states.get(batch).clone() for batch in range(len(batches))]
                loaded.run()
                prefix = f"{family.layer_prefix}.{loaded.index}."
                for group in by_layer.get(loaded.index, ()):
                    modules = {name: loaded.module.get_submodule(name.removeprefix(prefix)) for name in group.names}
                    with substitution.in_place(modules):
                        for batch, hidden in enumerate(inputs):
                            group.add(loaded.compute(batch, hidden), states.get(batch))
                bar.advance(1)
    finally:
        states.close()
        stream.close()
    measured = [group for groups in by_layer.values() for group in groups]
    damages = [Damage(modules=tuple(group.names), error=group.error) for group in measured]
    return tuple(sorted(damages, key=lambda damage: -damage.error))


@dataclass
class _Group:
    """Names of modules measured together; squared norms of output difference and output, summed over windows."""

    names: Sequence[str]
    difference: float = 0.0
    energy: float = 0.0

    def add(self, found: Tensor, expected: Tensor) -> None:
        """Add one window: the layer's output with the modules quantised, and without."""
        self.difference += float((found - expected).square().sum())
        self.energy += float(expected.square().sum())

    @property
    def error(self) -> float:
        """Norm of the difference / norm of the output."""
        return (self.difference / self.energy) ** 0.5 if self.energy else 0.0
