"""Medusa heads and EAGLE networks that become part of a torch engine: checks them against its model, copies their
files."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.digest import file_digest
from trtforge.core.errors import ForgeError
from trtforge.core.features import EagleFeature, FeaturesConfig, MedusaFeature
from trtforge.core.llm_api_features import Eagle3Feature
from trtforge.formats.eagle import EAGLE_DIRECTORY, EagleKind, EagleNetwork, read_eagle
from trtforge.formats.eagle_checkpoint import eagle_in
from trtforge.formats.medusa import MEDUSA_DIRECTORY, MEDUSA_FILE, gather_medusa, heads_in, read_medusa
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.medusa_plan import require_heads


@dataclass(frozen=True)
class Beside:
    """Files to copy and their directory in the engine. No files: the checkpoint's own heads or network are used."""

    directory: str
    files: tuple[Path, ...]

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each file, by its path in the engine."""
        return {f"{self.directory}/{path.name}": file_digest(path) for path in self.files}

    def copy(self, model: CheckpointConfig, checkpoint: Path, out: Path) -> None:
        """Copy or gather the files into the engine `out` of `model`, whose directory is `checkpoint`."""
        (out / self.directory).mkdir()
        if not self.files:
            from trtforge.compile.gathered_eagle import gather_eagle

            gather = gather_medusa if self.directory == MEDUSA_DIRECTORY else gather_eagle
            gather(model, checkpoint, out / self.directory)
        for path in self.files:
            shutil.copyfile(path, out / self.directory / path.name)


def files_beside(features: FeaturesConfig, model: CheckpointConfig, longest: int) -> Beside | None:
    """The drafting files that the features need beside the model; None if none. `longest`: maximum sequence length.

    Raises ForgeError for files that do not fit the model, and for settings that the torch backend does not support.
    """
    if features.medusa is not None:
        return _medusa_heads(features.medusa, model)
    if features.eagle is not None:
        return Beside(EAGLE_DIRECTORY, _eagle_files(features.eagle, "eagle", model, longest))
    if features.eagle3 is not None:
        return Beside(EAGLE_DIRECTORY, _eagle_files(features.eagle3, "eagle3", model, longest))
    return None


def _medusa_heads(medusa: MedusaFeature, model: CheckpointConfig) -> Beside:
    """The file of the heads; none if the checkpoint has its own. Raises ForgeError as `files_beside` does."""
    if model.parallel.pp > 1:
        raise ForgeError(
            f"engine.features.medusa: the heads read the last layer's output: pp must be 1, not {model.parallel.pp}",
            hint="Convert with --pp 1.",
        )
    own, directory = heads_in(model), Path(medusa.model or "")
    if own is not None:
        require_heads(medusa, *own, "the checkpoint")
        return Beside(MEDUSA_DIRECTORY, ())
    found = read_medusa(directory, model.hidden_size, model.vocab_size)
    require_heads(medusa, found.heads, found.layers, str(directory / MEDUSA_FILE))
    return Beside(MEDUSA_DIRECTORY, (directory / MEDUSA_FILE,))


def _eagle_files(
    feature: EagleFeature | Eagle3Feature, kind: EagleKind, model: CheckpointConfig, longest: int
) -> tuple[Path, ...]:
    """The files of the network; none if it is the checkpoint's. Raises ForgeError as `files_beside` does."""
    if model.parallel.pp > 1:
        raise ForgeError(
            f"engine.features.{kind}: the network reads hidden states of all layers: pp must be 1, not "
            f"{model.parallel.pp}",
            hint="Convert with --pp 1.",
        )
    if kind == "eagle" and eagle_in(model) is not None:
        return ()
    found = read_eagle(Path(feature.model or ""), kind, model)
    if model.parallel.tp > 1:
        _require_alone(found, model)
    from trtforge.runtime.decoder.eagle import require_network

    require_network(found, model.vocab_size, longest)
    return found.files


def _require_alone(network: EagleNetwork, model: CheckpointConfig) -> None:
    """Raises ForgeError if rank 0 cannot run the network alone: other ranks have parts of the LM head or embedding."""
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
