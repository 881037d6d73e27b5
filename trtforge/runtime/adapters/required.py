"""Checks that a model can have adapters."""

from collections.abc import Sequence
from pathlib import Path

import torch

from trtforge.core.features import LoraFeature
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.runtime.adapters.files import AdapterFile
from trtforge.runtime.adapters.parts import adapted_parts
from trtforge.runtime.adapters.rank_adapters import most_adapters
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.linears.linear import Placement


def require_adapters(
    config: CheckpointConfig, lora: LoraFeature, directories: Sequence[Path], dtype: torch.dtype
) -> None:
    """Raises ForgeError if an engine computing in `dtype` cannot apply adapters to a model, or has no room for them.

    `lora` must be resolved.
    """
    assert lora.max_rank is not None, "the feature is resolved"
    spec = DecoderSpec.of(config, 0)
    parts = [part for parts in adapted_parts(spec, config, lora.modules).values() for part in parts]
    shapes = {part.module: part.shape for part in parts}
    for directory in directories:
        file = AdapterFile(directory, shapes, config.num_hidden_layers, lora.max_rank)
        for layer in range(config.num_hidden_layers):
            for part in parts:
                file.read(layer, part, dtype)
    most_adapters(lora, config, spec, Placement(torch.device("cpu"), dtype))
