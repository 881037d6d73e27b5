"""`forge.json`: an artifact's identity and the digests of its files.

It is deterministic: no times, paths or host names. The same inputs give the same bytes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.core.digest import file_digest, text_digest
from trtforge.core.errors import AbsentFile, ForgeError
from trtforge.core.json_text import read_json
from trtforge.core.nearest import no_directory

FILE_NAME = "forge.json"
FOREIGN = "foreign"
"""Marks the identity of an artifact that other software wrote."""
SCHEMA_VERSION = 1

Stage = Literal["calibration", "checkpoint", "verification", "engine", "repository", "migration", "deployment"]


class FileRecord(Config):
    """One file of an artifact: size in bytes and hex BLAKE3."""

    bytes: int
    blake3: str


class Identity(Config):
    """What determines an artifact's bytes: equal identities give equal artifacts."""

    stage: Stage
    config: dict[str, Any] = Field(default_factory=dict)
    inputs: dict[str, str] = Field(default_factory=dict, description="Name of an input to its hex BLAKE3.")
    versions: dict[str, str] = Field(default_factory=dict, description="Versions of what computed the bytes.")

    @property
    def digest(self) -> str:
        """Hex BLAKE3 that identifies the artifact before it is written."""
        return text_digest(json.dumps(self.model_dump(mode="json"), sort_keys=True))

    def with_inputs(self, more: Mapping[str, str]) -> "Identity":
        """A copy with the digests of more inputs."""
        return self.model_copy(update={"inputs": {**self.inputs, **more}})

    def agrees_with(self, whole: "Identity") -> bool:
        """Whether `whole` equals this identity, apart from additional inputs."""
        return self.with_inputs(whole.inputs) == whole and self.inputs.items() <= whole.inputs.items()


class Manifest(Config):
    """The content of `forge.json`."""

    schema_version: int = SCHEMA_VERSION
    identity: Identity
    files: dict[str, FileRecord]

    @property
    def total_bytes(self) -> int:
        """Size of all files except `forge.json`."""
        return sum(record.bytes for record in self.files.values())

    def write(self, directory: Path) -> None:
        """Write `forge.json` into `directory`."""
        (directory / FILE_NAME).write_text(self.to_json())

    def to_json(self) -> str:
        """The exact text of `forge.json`."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"

    @property
    def digest(self) -> str:
        """Hex BLAKE3 of `forge.json`; identifies the artifact as an input of another stage."""
        return text_digest(self.to_json())


def lies_below(name: str) -> bool:
    """Whether a recorded path stays below its directory, as files are read, copied and linked by it."""
    return bool(name) and not Path(name).is_absolute() and ".." not in Path(name).parts


def is_foreign(manifest: Manifest) -> bool:
    """Whether other software wrote the artifact and `trtforge adopt` its manifest, which does not record the source."""
    return manifest.identity.config.get(FOREIGN) is True


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of `directory`, None if there is none. Raises ForgeError if it is damaged."""
    path = directory / FILE_NAME
    try:
        values = read_json(path, hint=f"Delete {directory} and build it again.")
    except AbsentFile:
        return None
    if not isinstance(values, dict) or values.get("schema_version") != SCHEMA_VERSION:
        raise ForgeError(
            f"{path}: written by another version of trtforge",
            hint=f"Delete {directory} and build it again with this version.",
        )
    manifest = Manifest.parse(values, str(path))
    elsewhere = next((name for name in manifest.files if not lies_below(name)), None)
    if elsewhere is not None:
        raise ForgeError(
            f"{path}: {elsewhere!r} is not the path of a file below {directory}",
            hint=f"Delete {directory} and build it again.",
        )
    return manifest


def record_of(path: Path) -> FileRecord:
    """Size and digest of a file on disk."""
    return FileRecord(bytes=path.stat().st_size, blake3=file_digest(path))


def files_below(directory: Path) -> list[str]:
    """Relative POSIX paths of all files below `directory` except `forge.json`, sorted."""
    paths = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != FILE_NAME)


def check_files(directory: Path, manifest: Manifest) -> str | None:
    """The first fault of the recorded files; None if all exist with their recorded digests."""
    faults = (fault_of(directory / name, record) for name, record in manifest.files.items())
    return next((fault for fault in faults if fault is not None), None)


def fault_of(path: Path, record: FileRecord) -> str | None:
    """The fault of a file compared with its record; None if it is unchanged."""
    if not path.is_file():
        return f"{path} is missing"
    if path.stat().st_size != record.bytes:
        return f"{path} has {path.stat().st_size} bytes instead of {record.bytes}"
    if file_digest(path) != record.blake3:
        return f"{path} was changed after it was written"
    return None


def open_artifact(directory: Path, stage: Stage) -> Manifest:
    """The manifest of a stage's input artifact, after checking every file.

    Raises ForgeError if it is absent, of another stage, incomplete or changed.
    """
    manifest = require_manifest(directory, stage)
    problem = check_files(directory, manifest)
    if problem is not None:
        raise damaged(directory, manifest, problem)
    return manifest


def require_manifest(directory: Path, stage: Stage) -> Manifest:
    """The manifest of an artifact, without checking its files. Raises ForgeError if absent or of another stage."""
    if not directory.is_dir():
        raise no_directory(directory, otherwise=f"Give the {stage} that {_MADE_BY[stage]} writes.")
    manifest = read_manifest(directory)
    if manifest is None:
        raise ForgeError(f"{directory} is not a trtforge {stage}: it has no {FILE_NAME}", hint=_hint(directory, stage))
    if manifest.identity.stage != stage:
        there = manifest.identity.stage
        use = use_of(directory, there)
        raise ForgeError(
            f"{directory} is the result of stage {there}, {stage} is required",
            hint=f"Give the {stage} that {_MADE_BY[stage]} writes.{f' With this {there}: `{use}`.' if use else ''}",
        )
    return manifest


_MADE_BY: dict[Stage, str] = {
    "calibration": "`trtforge calibrate HF_DIR OUT`",
    "checkpoint": "`trtforge convert HF_DIR OUT`",
    "verification": "`trtforge build RECIPE`",
    "engine": "`trtforge compile CHECKPOINT OUT`",
    "migration": "`trtforge migrate ENGINE_OR_REPO OUT`",
    "repository": "`trtforge package ENGINE OUT`",
    "deployment": "`trtforge deploy kubernetes REPO OUT`",
}
"""The command that writes an artifact."""


_USES: dict[Stage, str] = {
    "calibration": "convert HF_DIR OUT --calibration {}",
    "checkpoint": "compile {} ENGINE",
    "engine": "package {} REPOSITORY",
    "repository": "serve {}",
}
"""The words of the command that uses an artifact."""


def use_of(directory: Path, stage: Stage) -> str | None:
    """The command that uses an artifact; None if there is none."""
    command = _USES.get(stage)
    return f"trtforge {command.format(quote(str(directory)))}" if command else None


def _hint(directory: Path, stage: Stage) -> str:
    if (directory / stage / FILE_NAME).is_file():
        return f"Give {directory / stage}."
    named = quote(str(directory))
    if any(directory.glob("*/config.pbtxt")):
        return (
            "It is a Triton model repository that trtforge did not write: "
            f"`trtforge migrate {named} OUT` takes over its settings, `tritonserver` serves it as it is."
        )
    return f"Give the {stage} that {_MADE_BY[stage]} writes. `trtforge inspect {named}` shows what this is."


def damaged(directory: Path, manifest: Manifest, problem: str) -> ForgeError:
    """The error for an artifact whose files do not match its manifest."""
    from trtforge.core.remedy import remedy

    message = f"{manifest.identity.stage} {directory} is damaged: {problem}"
    return ForgeError(message, hint=remedy(directory, manifest, problem))
