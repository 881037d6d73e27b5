"""Layer by layer: what comes out of each decoder layer of the candidate against the same layer of the reference."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trtforge.core.progress import Progress
from trtforge.models.family import Family
from trtforge.runtime.batch import Step
from trtforge.runtime.source import open_model
from trtforge.runtime.thread_ranks import ThreadRanks
from trtforge.verify.reference import Reference
from trtforge.verify.result import LayerError

_BLOCK = 32


class _Outputs:
    """What came out of the layers of one side for the current window."""

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}

    def keep(self, layer: int, hidden: Tensor) -> None:
        """(tokens, hidden) of a layer."""
        self.of[layer] = hidden.detach().float().reshape(-1, hidden.shape[-1]).clone()


def layer_errors(
    candidate: Path, reference: Reference, family: Family, windows: Sequence[tuple[int, ...]], progress: Progress
) -> tuple[LayerError, ...]:
    """The error after every layer, over all windows. Both sides get the tokens; each goes on with its own states."""
    ours, theirs = _Outputs(), _Outputs()
    source = open_model(candidate)
    blocks = max(-(-len(window) // source.tokens_per_block) for window in windows)
    ranks = ThreadRanks(source, blocks, ours.keep)
    hooks = _watch(reference.model.get_submodule(family.layer_path), theirs)
    difference: dict[int, float] = {}
    energy: dict[int, float] = {}
    try:
        with torch.inference_mode(), progress.bar("Comparing layers", len(windows), "windows") as bar:
            for window in windows:
                ranks.execute(_whole(window, source.tokens_per_block))
                reference.logits(torch.tensor(window))
                for layer, states in theirs.of.items():
                    found = ours.of[layer][: len(states)]
                    difference[layer] = difference.get(layer, 0.0) + float((found - states).square().sum())
                    energy[layer] = energy.get(layer, 0.0) + float(states.square().sum())
                bar.advance(1)
    finally:
        for hook in hooks:
            hook.remove()
        ranks.close()
    errors = [(difference[layer] / energy[layer]) ** 0.5 for layer in sorted(difference)]
    return tuple(
        LayerError(layer=layer, error=error, added=error - (errors[layer - 1] if layer else 0.0))
        for layer, error in enumerate(errors)
    )


def _watch(layers: nn.Module, into: _Outputs) -> list[Any]:
    def hook(number: int) -> Any:
        return lambda _, __, output: into.keep(number, output[0] if isinstance(output, tuple) else output)

    return [layer.register_forward_hook(hook(number)) for number, layer in enumerate(layers.children())]


def _whole(window: tuple[int, ...], tokens_per_block: int) -> Step:
    """One sequence in one step, logits of its last token."""
    tokens = np.array(window, dtype=np.int64)
    table = np.arange(-(-len(window) // tokens_per_block), dtype=np.int64).reshape(1, -1)
    count, one, zero = np.array([len(window)]), np.array([1]), np.array([0])
    return Step(zero, count, one, table, tokens, length=len(window))
