"""Which linear layers lose most by quantisation: each alone is quantised in the reference model, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtforge.core.manifest import open_artifact
from trtforge.core.progress import Progress, Silent
from trtforge.core.recipe import GateConfig
from trtforge.formats.corpus import token_windows
from trtforge.formats.hf import open_checkpoint
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.models.checkpoint_config import layout_of_checkpoint
from trtforge.models.exclusions import inseparable
from trtforge.models.plan import checkpoint_plan
from trtforge.models.registry import family_of_checkpoint
from trtforge.verify.reference import Reference, load_reference
from trtforge.verify.result import Damage
from trtforge.verify.substitution import Substitution

_WINDOWS = 8  # of the gate's data: enough for an order


def rank_linears(
    candidate: Path, reference: Path, gate: GateConfig, *, progress: Progress | None = None
) -> tuple[Damage, ...]:
    """The linear layers of a checkpoint with one rank that can be left unquantised, the most damaging first.

    What one scale serves is judged together. Experts are not judged: they cannot be left out. Raises ForgeError for a
    damaged checkpoint and for data that cannot be used.
    """
    open_artifact(candidate, "checkpoint")
    config, source = read_checkpoint_config(candidate), open_checkpoint(reference)
    family, layout = family_of_checkpoint(source), layout_of_checkpoint(config)
    assert layout is not None, "a checkpoint of ours"
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
    model = load_reference(reference)
    by_layer: dict[int, list[_Group]] = {}
    for names in inseparable(family, facts):
        if all(map(substitution.takes, names)):
            layer = int(names[0].removeprefix(f"{family.layer_prefix}.").partition(".")[0])
            modules = {name: model.model.get_submodule(family.stripped + name) for name in names}
            by_layer.setdefault(layer, []).append(_Group(modules))
    layers: list[nn.Module] = list(model.model.get_submodule(family.layer_path).children())
    steps = len(windows) * len(by_layer)
    with torch.inference_mode(), (progress or Silent()).bar("Ranking linears", steps, "layers") as bar:
        for window in windows:
            calls = _calls(model, layers, window)
            for index, judged in by_layer.items():
                expected = calls[index].output
                energy = float(expected.square().sum())
                for group in judged:
                    with substitution.in_place(group.modules):
                        found = calls[index].repeat(layers[index])
                    group.difference += float((found - expected).square().sum())
                    group.energy += energy
                bar.advance(1)
    ranked = [group for judged in by_layer.values() for group in judged]
    damages = [Damage(modules=tuple(group.modules), error=group.error) for group in ranked]
    return tuple(sorted(damages, key=lambda damage: -damage.error))


@dataclass
class _Group:
    """Modules that are judged together, by name, and sums over windows of the layer's output with and without them."""

    modules: dict[str, nn.Module]
    difference: float = 0.0
    energy: float = 0.0

    @property
    def error(self) -> float:
        """Norm of the difference / norm of the output."""
        return (self.difference / self.energy) ** 0.5 if self.energy else 0.0


@dataclass(frozen=True)
class _Call:
    """What a layer got for a window, and its output (tokens, hidden) float32."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor

    def repeat(self, layer: nn.Module) -> Tensor:
        """The output of the layer as it is now."""
        return _hidden(layer(*self.arguments, **self.keywords))


def _calls(model: Reference, layers: Sequence[nn.Module], window: tuple[int, ...]) -> list[_Call]:
    """One window through the reference."""
    calls: list[_Call] = []

    def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        calls.append(_Call(arguments, keywords, _hidden(output)))

    hooks = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    try:
        model.logits(torch.tensor(window))
    finally:
        for handle in hooks:
            handle.remove()
    return calls


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden.float()
