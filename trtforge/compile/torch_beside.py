"""Medusa heads and EAGLE networks that become part of a torch engine: whether they fit its model, and their files."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.digest import file_digest
from trtforge.core.errors import ForgeError
from trtforge.core.features import EagleFeature, FeaturesConfig, MedusaFeature
from trtforge.core.llm_api_features import Eagle3Feature
from trtforge.formats.eagle import EAGLE_DIRECTORY, EagleKind, EagleNetwork, read_eagle
from trtforge.formats.medusa import MEDUSA_DIRECTORY, MEDUSA_FILE, read_medusa
from trtforge.formats.trtllm import CheckpointConfig


@dataclass(frozen=True)
class Beside:
    """Files to copy, and the engine's directory for them."""

    directory: str
    files: tuple[Path, ...]

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each file, by its place in the engine."""
        return {f"{self.directory}/{path.name}": file_digest(path) for path in self.files}

    def copy(self, out: Path) -> None:
        """Put them into the engine."""
        (out / self.directory).mkdir()
        for path in self.files:
            shutil.copyfile(path, out / self.directory / path.name)


def files_beside(features: FeaturesConfig, model: CheckpointConfig, longest: int) -> Beside | None:
    """What the features put beside the model; `longest`: maximum sequence length. Raises ForgeError if it does not fit
    the model, or cannot be had as asked for."""
    if features.medusa is not None:
        return Beside(MEDUSA_DIRECTORY, (_medusa_heads(features.medusa, model),))
    if features.eagle is not None:
        return Beside(EAGLE_DIRECTORY, _eagle_network(features.eagle, "eagle", model, longest).files)
    if features.eagle3 is not None:
        return Beside(EAGLE_DIRECTORY, _eagle_network(features.eagle3, "eagle3", model, longest).files)
    return None


def _medusa_heads(medusa: MedusaFeature, model: CheckpointConfig) -> Path:
    """The file of the heads. Raises ForgeError if they are not for `model`, or cannot be had as asked for."""
    if medusa.choices is not None:
        raise ForgeError(
            "engine.features.medusa.choices: not supported by the torch backend, which verifies the most likely tokens",
            hint="Leave choices out, or use the tensorrt_llm backend.",
        )
    if model.parallel.pp > 1:
        raise ForgeError(
            f"engine.features.medusa: the heads read what the last layer gives, and pp is {model.parallel.pp}",
            hint="Convert with --pp 1.",
        )
    directory = Path(medusa.model or "")
    found = read_medusa(directory, model.hidden_size, model.vocab_size)
    for name, asked, has in (("heads", medusa.heads, found.heads), ("layers", medusa.layers, found.layers)):
        if asked is not None and (asked > has or (name == "layers" and asked != has)):
            raise ForgeError(
                f"engine.features.medusa.{name} is {asked}, {directory / MEDUSA_FILE} has {has}",
                hint=f"Leave {name} out, or give {has}.",
            )
    return directory / MEDUSA_FILE


def _eagle_network(
    feature: EagleFeature | Eagle3Feature, kind: EagleKind, model: CheckpointConfig, longest: int
) -> EagleNetwork:
    if isinstance(feature, EagleFeature) and feature.choices is not None:
        raise ForgeError(
            "engine.features.eagle.choices: not supported by the torch backend, which verifies the most likely tokens",
            hint="Leave choices out, or use the tensorrt_llm backend.",
        )
    if model.parallel.pp > 1:
        raise ForgeError(
            f"engine.features.{kind}: the network reads hidden states of all layers, and pp is {model.parallel.pp}",
            hint="Convert with --pp 1.",
        )
    found = read_eagle(Path(feature.model or ""), kind, model)
    if model.parallel.tp > 1:
        _require_alone(found, model)
    from trtforge.runtime.decoder.eagle import require_network

    require_network(found, model.vocab_size, longest)
    return found


def _require_alone(network: EagleNetwork, model: CheckpointConfig) -> None:
    """Rank 0 runs the network without the others, which hold parts of the LM head and perhaps of the embedding."""
    needed = {"lm_head.weight": "LM head", "embed_tokens.weight": "embedding"}
    if not model.use_parallel_embedding:
        del needed["embed_tokens.weight"]
    for name, said in needed.items():
        if name not in network.tensors:
            raise ForgeError(
                f"engine.features.{network.kind}: the network has no {said} of its own, and the model's is split over "
                f"{model.parallel.tp} ranks",
                hint="Convert with --tp 1.",
            )
