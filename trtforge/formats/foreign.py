"""Foreign checkpoints and engines: TensorRT-LLM's, without trtforge's `forge.json`.

Their manifest is computed from their files. `trtforge adopt` writes the same manifest, so artifacts made from them
before remain valid.
"""

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.figures import counted
from trtforge.core.json_text import read_json_object
from trtforge.core.manifest import FILE_NAME, FOREIGN, Identity, Manifest, Stage, files_below, open_artifact, record_of
from trtforge.core.parallel import Parallel
from trtforge.formats.hf import SOURCE_DIRECTORY, TOKENIZER_DIRECTORY
from trtforge.formats.trtllm import (
    CARRIED_FILE,
    CONFIG_FILE,
    LAYERS_FILE,
    rank_file,
    read_checkpoint_config,
    read_engine_config,
)


def checkpoint_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint, after checking every file; for a foreign one, computed by hashing every file.

    Raises ForgeError as `open_artifact` does, and for a foreign checkpoint whose rank files do not match its
    config.json.
    """
    if foreign_stage(directory) != "checkpoint":
        return open_artifact(directory, "checkpoint")
    return _manifest(directory, "checkpoint", _checkpoint_files(directory))


def engine_manifest(directory: Path) -> Manifest:
    """The manifest of an engine, after checking every file; for a foreign one, computed by hashing every file.

    Raises ForgeError as `open_artifact` and `read_engine_config` do.
    """
    if (directory / FILE_NAME).exists() or not (directory / CONFIG_FILE).is_file():
        return open_artifact(directory, "engine")
    read_engine_config(directory)
    return _manifest(directory, "engine", _visible_files(directory))


def foreign_stage(directory: Path) -> Stage | None:
    """Whether a directory without a manifest is a checkpoint or an engine of TensorRT-LLM; None if it is neither.

    Raises ForgeError if its config.json is damaged.
    """
    path = directory / CONFIG_FILE
    if (directory / FILE_NAME).exists() or not path.is_file():
        return None
    values = read_json_object(path, hint="Make the directory again.")
    if "pretrained_config" in values:
        return "engine"
    return "checkpoint" if "architecture" in values else None


def foreign_note(directory: Path) -> str | None:
    """A note that a checkpoint or engine was not written by trtforge; None for other directories."""
    stage = foreign_stage(directory)
    if stage is None:
        return None
    return (
        f"{directory} is a foreign {stage}: trtforge did not write it, and uses its files as they are; "
        f"`trtforge adopt {quote(str(directory))}` checks them and records their digests"
    )


def _manifest(directory: Path, stage: Stage, names: list[str]) -> Manifest:
    """The manifest of `names`. `versions`: the software that wrote them, by config.json."""
    values = read_json_object(directory / CONFIG_FILE, hint="Make the directory again.")
    identity = Identity(stage=stage, config={FOREIGN: True}, versions=_written_by(values))
    return Manifest(identity=identity, files={name: record_of(directory / name) for name in names})


def _written_by(values: Mapping[str, Any]) -> dict[str, str]:
    """Name and version of the program that wrote a config.json: ModelOpt writes `producer`, TensorRT-LLM `version`."""
    producer = values.get("producer")
    if isinstance(producer, dict) and isinstance(producer.get("name"), str):
        return {producer["name"]: str(producer.get("version", "of an unknown version"))}
    return {"tensorrt_llm": str(values["version"])} if "version" in values else {}


def _checkpoint_files(directory: Path) -> list[str]:
    """All files of a checkpoint that are used. Raises ForgeError for rank files of another layout."""
    names = require_rank_files(directory, read_checkpoint_config(directory).parallel)
    tokenizer = directory / TOKENIZER_DIRECTORY
    beside = [f"{TOKENIZER_DIRECTORY}/{name}" for name in _visible_files(tokenizer)] if tokenizer.is_dir() else []
    others = (LAYERS_FILE, CARRIED_FILE, f"{SOURCE_DIRECTORY}/{CONFIG_FILE}")
    return sorted([CONFIG_FILE, *names, *beside, *(name for name in others if (directory / name).is_file())])


def require_rank_files(directory: Path, parallel: Parallel) -> list[str]:
    """The names of a checkpoint's rank files. Raises ForgeError for one that is missing or of another layout."""
    names = [rank_file(rank.index) for rank in parallel.ranks]
    ranks = counted(len(names), "rank")
    layout = f"config.json says {ranks} (tp {parallel.tp}, pp {parallel.pp})"
    hint = "Complete the directory, or make it again."
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ForgeError(f"{directory / missing[0]} is missing: {layout}", hint=hint)
    others = sorted({path.name for path in directory.glob("rank*.safetensors")} - set(names))
    if others:
        raise ForgeError(f"unexpected file {directory / others[0]}: {layout}", hint=hint)
    return names


def _visible_files(directory: Path) -> list[str]:
    """All files but those in directories such as .git and .cache."""
    return [name for name in files_below(directory) if not any(part.startswith(".") for part in Path(name).parts)]
