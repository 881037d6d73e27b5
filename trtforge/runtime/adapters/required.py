"""Which adapters a model can have."""

from collections.abc import Sequence
from pathlib import Path

from trtforge.core.features import LoraFeature
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.runtime.adapters.files import AdapterFile
from trtforge.runtime.adapters.parts import adapted_parts
from trtforge.runtime.architecture.spec import DecoderSpec


def require_adapters(config: CheckpointConfig, lora: LoraFeature, directories: Sequence[Path]) -> None:
    """Raises ForgeError for adapters that an engine cannot apply to a model. `lora` is resolved."""
    assert lora.max_rank is not None, "the feature is resolved"
    parts = [
        part for parts in adapted_parts(DecoderSpec.of(config, 0), config, lora.modules).values() for part in parts
    ]
    shapes = {part.module: part.shape for part in parts}
    for directory in directories:
        file = AdapterFile(directory, shapes, config.num_hidden_layers, lora.max_rank)
        for layer in range(config.num_hidden_layers):
            for part in parts:
                file.read(layer, part)
