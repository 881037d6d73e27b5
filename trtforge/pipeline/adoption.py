"""Floor 5: adopt a foreign checkpoint or engine: check it, then write its manifest beside its files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.figures import listed
from trtforge.core.manifest import FILE_NAME, Manifest, check_files, is_foreign, read_manifest, require_manifest, use_of
from trtforge.core.progress import Progress, Silent
from trtforge.core.remedy import remedy
from trtforge.core.replace import replace_text
from trtforge.formats.foreign import checkpoint_manifest, engine_manifest, foreign_stage, require_rank_files
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.formats.tokenizer import require_tokenizer
from trtforge.formats.trtllm import CheckpointConfig, read_checkpoint_config, read_engine_config
from trtforge.package.engine_facts import read_engine


@dataclass(frozen=True)
class Adoption:
    """An artifact and its manifest. `tensors`: number of checked tensors; `already`: the manifest existed before.

    `unknown`: facts that its files do not give, one sentence each.
    """

    directory: Path
    manifest: Manifest
    tensors: int = 0
    already: bool = False
    unknown: tuple[str, ...] = ()

    @property
    def next_command(self) -> str | None:
        """The command that uses the artifact next; None if there is none."""
        return use_of(self.directory, self.manifest.identity.stage)


def adopt(directory: Path, progress: Progress | None = None) -> Adoption:
    """Check a foreign checkpoint or engine and write its forge.json.

    Raises ForgeError for a directory that is neither, for tensors that do not match its config.json, for scaling
    factors that are not finite, and for an artifact whose files differ from its manifest.
    """
    stage = foreign_stage(directory) if directory.is_dir() else None
    known = read_manifest(directory) if directory.is_dir() else None
    if known is not None:
        return _known(directory, known)
    if stage == "engine":
        found = _engine(directory)
    elif stage is None and any(directory.glob("*/config.pbtxt")):
        require_manifest(directory, "checkpoint")  # its error explains what to do with a repository
        raise AssertionError(directory)
    else:
        found = _checkpoint(directory, progress or Silent())
    try:
        replace_text(directory / FILE_NAME, found.manifest.to_json())
    except OSError as error:
        raise ForgeError(
            f"{directory / FILE_NAME}: cannot be written: {error.strerror}",
            hint="Copy the directory to a place that you may write to, and adopt the copy.",
        ) from None
    return found


def _known(directory: Path, manifest: Manifest) -> Adoption:
    """The result for an artifact that already has a manifest. Raises ForgeError if its files differ from it."""
    fault = check_files(directory, manifest)
    if fault is None:
        return Adoption(directory, manifest, already=True)
    hint = remedy(directory, manifest, fault)
    if is_foreign(manifest):
        hint = f"If the change is meant, delete {directory / FILE_NAME} and adopt the directory again."
    raise ForgeError(f"{directory} has a {FILE_NAME} that its files contradict: {fault}", hint=hint)


def _checkpoint(directory: Path, progress: Progress) -> Adoption:
    from trtforge.runtime.ranks.checkpoint_check import nonfinite_weights, require_network, unchecked_network

    config = read_checkpoint_config(directory)
    _require_layout(config, directory)
    require_rank_files(directory, config.parallel)
    require_tokenizer(directory / TOKENIZER_DIRECTORY, config.vocab_size)
    unchecked, ranks = unchecked_network(config), config.parallel.ranks
    tensors = 0 if unchecked else sum(require_network(config, directory, rank.index) for rank in ranks)
    broken: list[str] = []
    with progress.bar("Checking", len(ranks), "ranks") as bar:
        for rank in ranks:
            broken += nonfinite_weights(directory, rank.index)
            bar.advance(1)
    manifest = checkpoint_manifest(directory)
    unknown = _unknown_of_checkpoint(config, directory, manifest, unchecked)
    return Adoption(directory, manifest, tensors, unknown=(*unknown, *_broken(broken)))


def _engine(directory: Path) -> Adoption:
    config, values = read_engine_config(directory)
    manifest = engine_manifest(directory)
    require_tokenizer(directory / TOKENIZER_DIRECTORY, config.vocab_size)
    unknown = [
        "the checkpoint that it was built from",
        "the GPU, compute capability and TensorRT that it was built for",
    ]
    if values["build_config"].get("max_draft_len"):
        unknown.append("the method of its speculative decoding: `trtforge package` takes it with --feature")
    else:
        read_engine(directory, manifest)
    return Adoption(directory, manifest, unknown=(*unknown, *_without_tokenizer(directory)))


def _require_layout(config: CheckpointConfig, directory: Path) -> None:
    """Raises ForgeError for a mapping that contradicts itself or the model's sizes."""
    parallel, said = config.parallel, config.mapping.get("world_size")
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    wrong = ""
    if said is not None and said != parallel.world_size:
        wrong = f"world_size {said} is not tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp}"
    elif heads % parallel.tp:
        wrong = f"tp_size {parallel.tp} does not divide {heads} attention heads"
    elif layers % parallel.pp:
        wrong = f"pp_size {parallel.pp} does not divide {layers} layers"
    if wrong:
        raise ForgeError(f"{directory / 'config.json'}: mapping: {wrong}", hint="Make the checkpoint again.")


def _unknown_of_checkpoint(
    config: CheckpointConfig, directory: Path, manifest: Manifest, unchecked: str | None
) -> Iterator[str]:
    yield "the model that it was made from: no digests of its source, so that `verify` compares sizes and tensors"
    if config.quantization.quant_algo not in (None, "NO_QUANT", "W8A16", "W4A16"):
        yield "the data that its scaling factors were measured on"
    if not manifest.identity.versions:
        yield "the program that wrote it: config.json has neither producer nor version"
    if config.position_embedding_type.startswith("rope") and "rotary_base" not in config.model_fields_set:
        yield f"rotary_base: config.json has none, so that {config.rotary_base:g} is taken; compare it with the model's"
    if unchecked is not None:
        yield f"whether its tensors are those of its network, which was not checked: {unchecked}"
    yield from _without_tokenizer(directory)


def _without_tokenizer(directory: Path) -> Iterator[str]:
    if not (directory / TOKENIZER_DIRECTORY).is_dir():
        yield "its tokenizer: give the model's directory to `trtforge package` with --tokenizer"


def _broken(found: list[str]) -> Iterator[str]:
    if found:
        yield f"whether weights that are not finite are meant: {listed(found, between='; ')}"
