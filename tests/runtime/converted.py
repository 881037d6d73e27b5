"""Checkpoints of tiny models, written by the project's own converter, and the logits that they give."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.runtime.runner import Runner
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.runtime.ranks.source import open_model

_generator = torch.Generator().manual_seed(3)
TOKENS = torch.randint(3, 131, (40,), generator=_generator).tolist()
LONG = torch.randint(3, 131, (100,), generator=_generator).tolist()
"""Longer than the original length of scaled rotaries."""


@dataclass(frozen=True)
class Family:
    """A tiny model, and where checkpoints of it are written."""

    model: PreTrainedModel
    directory: Path

    def logits(self, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(torch.tensor([tokens])).logits[0]
            return logits

    def checkpoint(self, **layout: Any) -> Path:
        """What the converter writes for a layout, made once."""
        name = "-".join(f"{key}{value}" for key, value in layout.items()) or "plain"
        if not (self.directory / "hf").exists():
            self.model.save_pretrained(self.directory / "hf")
        return convert(ConvertConfig(dtype="float32", **layout), self.directory / "hf", self.directory / name).path


Families = Callable[[str], Family]


def computed(directory: Path, *sequences: list[int]) -> list[Tensor]:
    """Logits of whole sequences, by all ranks of a checkpoint or engine."""
    source = open_model(directory)
    with Runner(source, ThreadRanks(source, 8)) as runner:  # type: ignore[arg-type]
        return [runner.logits(sequence) for sequence in sequences]


def error(made: Tensor, reference: Tensor) -> float:
    """The largest, relative to the largest number."""
    return float((made - reference).abs().max() / reference.abs().max())


def edited(checkpoint: Path, directory: Path, changes: dict[str, Any]) -> Path:
    """The checkpoint with other values in its config.json."""
    values = json.loads((checkpoint / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(values))
    for path in checkpoint.glob("rank*.safetensors"):
        (directory / path.name).symlink_to(path)
    return directory
