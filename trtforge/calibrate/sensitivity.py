"""Predicts the damage of quantising linear layers, alone and in each format, in one pass over a few samples.

The output error of a linear layer follows from the second moments of its input (calibrate.format_errors). Its effect on
the decoder layer's output is measured in the first samples, with noise of the same size added to the linear layer's
output.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtforge.calibrate.format_errors import Modules, ObservedLinear, input_rounding, weight_errors
from trtforge.calibrate.layer import LayerObserver, Needs
from trtforge.core.progress import Progress, Silent
from trtforge.core.recipe import GateConfig, QuantFormat
from trtforge.formats.calibration import Calibration, open_calibration
from trtforge.formats.corpus import token_windows
from trtforge.formats.damages import Predicted
from trtforge.formats.hf import open_checkpoint
from trtforge.models.exclusions import inseparable
from trtforge.models.registry import family_of_checkpoint
from trtforge.reference.hidden import HiddenStates
from trtforge.reference.streaming import LayerStream, LoadedLayer
from trtforge.reference.weights import LayerWeights

_WINDOWS = 16  # of the gate's data
_PROBED = 2  # of them get noise


def predict_damages(
    calibration: Path,
    source: Path,
    gate: GateConfig,
    formats: Sequence[QuantFormat],
    *,
    progress: Progress | None = None,
) -> tuple[Predicted, ...]:
    """The linear layers of `source` that can be left unquantised, in order, with the damage in each of `formats`.

    Experts are skipped, because they cannot be excluded. Raises ForgeError for a calibration that is damaged, of
    another model or lacks what a format needs, and for unusable data.
    """
    calibrated, checkpoint = open_calibration(calibration), open_checkpoint(source)
    family = family_of_checkpoint(checkpoint)
    facts = family.facts(checkpoint.config)
    windows = token_windows(
        gate.data,
        source,
        samples=min(gate.samples, _WINDOWS),
        length=gate.sequence_length,
        vocab_size=facts.sizes.vocab,
        seed=0,
        part="held_out",
    ).windows
    batches = [torch.tensor([list(window)]) for window in windows]
    cpu = torch.device("cpu")
    states = HiddenStates([(1, len(window)) for window in windows], facts.sizes.hidden, torch.float32, cpu)
    stream = LayerStream(LayerWeights(checkpoint, family, cpu, torch.float32))
    groups = tuple(inseparable(family, facts))
    needs, found = Needs(magnitudes=False, awq=True, nvfp4="nvfp4" in formats), list[Predicted]()
    try:
        with torch.inference_mode(), (progress or Silent()).bar("Predicting", facts.sizes.num_layers, "layers") as bar:
            for loaded in stream.layers(batches, states):
                inputs = [states.get(batch).clone() for batch in range(min(_PROBED, len(batches)))]
                observer = LayerObserver(loaded.module, loaded.index, family, facts, needs)
                with observer:
                    loaded.run()
                linears, probe = _observed(observer, groups), _Probe(loaded, inputs, observer)
                for group in groups:
                    if group[0] in linears:
                        found.append(_predicted([linears[name] for name in group], formats, calibrated, probe))
                bar.advance(1)
    finally:
        states.close()
        stream.close()
    return tuple(found)


def _observed(observer: LayerObserver, groups: Sequence[tuple[str, ...]]) -> dict[str, ObservedLinear]:
    """The linears of a layer by their full names."""
    together, found = {name: group for group in groups for name in group}, dict[str, ObservedLinear]()
    for module, weight, statistics, row in observer.dense():
        name = f"{observer.prefix}.{module}"
        joined = tuple(dict.fromkeys(f"{observer.prefix}.{part.module}" for part in row.parts))
        found[name] = ObservedLinear(name, weight, statistics, Modules(joined, together[name]))
    return found


@dataclass(frozen=True)
class _Probe:
    """Disturbs linear layers on some batches and measures the error of the decoder layer's output."""

    loaded: LoadedLayer
    inputs: Sequence[Tensor]
    observer: LayerObserver

    def damage(self, disturbed: Mapping[str, tuple[Callable[[Tensor], Tensor], Tensor]]) -> float:
        """Relative error of the layer's output. `disturbed`: by module, the function that rounds its inputs, and the
        standard deviation of each output's noise."""
        generator, hooks = torch.Generator().manual_seed(0), []
        for name, (rounded, deviation) in disturbed.items():
            module = self.observer.module(name.removeprefix(f"{self.observer.prefix}."))
            hooks.append(module.register_forward_pre_hook(_rounding(rounded)))
            hooks.append(module.register_forward_hook(_noise(deviation, generator)))
        difference = energy = 0.0
        try:
            for batch, hidden in enumerate(self.inputs):
                expected = self.loaded.hidden.get(batch)
                difference += float((self.loaded.compute(batch, hidden) - expected).square().sum())
                energy += float(expected.square().sum())
        finally:
            for hook in hooks:
                hook.remove()
        return (difference / energy) ** 0.5 if energy else 0.0


def _rounding(rounded: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def replace(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return rounded(inputs[0].flatten(0, -2)).view_as(inputs[0]), *inputs[1:]

    return replace


def _noise(deviation: Tensor, generator: torch.Generator) -> Callable[..., Tensor]:
    def add(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + torch.randn(output.shape, generator=generator) * deviation

    return add


def _predicted(
    linears: Sequence[ObservedLinear], formats: Sequence[QuantFormat], calibration: Calibration, probe: _Probe
) -> Predicted:
    damage = dict[QuantFormat, float]()
    for quant in formats:
        disturbed = {}
        for linear in linears:
            errors = weight_errors(linear, quant, calibration) / max(1, linear.statistics.tokens)
            disturbed[linear.module] = input_rounding(linear.modules, quant, calibration), errors.sqrt_()
        damage[quant] = probe.damage(disturbed)
    return Predicted(
        modules=tuple(linear.module for linear in linears),
        weights=sum(linear.weight.numel() for linear in linears),
        damage=damage,
    )
