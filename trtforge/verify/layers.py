"""Compares reference and candidate over all windows, with one decoder layer of each in memory."""

from collections.abc import Sequence
from pathlib import Path

import torch

from trtforge.core.progress import Progress
from trtforge.formats.hf import HfCheckpoint
from trtforge.reference.hidden import HiddenStates
from trtforge.runtime.ranks.layerwise import Layerwise
from trtforge.runtime.ranks.source import open_model
from trtforge.verify.comparison import Comparison
from trtforge.verify.reference import stream_reference
from trtforge.verify.result import LayerError


def compare_by_layer(
    candidate: Path, reference: HfCheckpoint, windows: Sequence[Sequence[int]], progress: Progress, *, layers: bool
) -> tuple[Comparison, tuple[LayerError, ...]]:
    """Run both models on the same windows, each on its own hidden states. `layers`: also measure each layer's error.

    Checkpoints compute in float32, engines as compiled.
    """
    batches = [torch.tensor([list(window)]) for window in windows]
    comparison, errors = Comparison(), list[float]()
    stream = stream_reference(reference)
    with Layerwise(open_model(candidate), windows) as ours, torch.inference_mode():
        states = HiddenStates(
            [(1, len(window)) for window in windows], ours.hidden_size, torch.float32, torch.device("cpu")
        )
        try:
            with progress.bar("Verifying", ours.num_layers, "layers") as bar:

                def half(share: float) -> None:
                    """Advance the bar by half of a layer's share, as each of the two models computes one half."""
                    bar.advance(share / 2)

                for layer in stream.layers(batches, states):
                    layer.run(half)
                    ours.advance(half)
                    if layers:
                        errors.append(_error(states, ours, len(windows)))
            ours.load_logits()
            with progress.bar("Comparing logits", len(windows), "windows") as bar:
                for window, expected in enumerate(stream.logits(batches, states)):
                    comparison.add(expected[0], ours.logits(window), batches[window][0])
                    bar.advance(1)
        finally:
            states.close()
            stream.close()
    return comparison, tuple(
        LayerError(layer=layer, error=error, added=error - (errors[layer - 1] if layer else 0.0))
        for layer, error in enumerate(errors)
    )


def _error(states: HiddenStates, ours: Layerwise, windows: int) -> float:
    """Norm of the difference of all hidden states / norm of the reference's."""
    difference = energy = 0.0
    for window in range(windows):
        expected = states.get(window)[0]
        difference += float((ours.states(window) - expected).square().sum())
        energy += float(expected.square().sum())
    return float((difference / energy) ** 0.5)
