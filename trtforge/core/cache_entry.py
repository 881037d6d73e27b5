"""An entry of the cache: a directory with an artifact and its record, whose mtime is the time of the last use."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import read_json
from trtforge.core.manifest import Manifest, Stage

ARTIFACTS = "artifacts"
ARTIFACT = "artifact"
NEW = ".new"
_RECORD = "entry.json"


class About(Config):
    """The description of an artifact in `trtforge cache list`."""

    architecture: str
    layers: int
    hidden: int = Field(description="Hidden size.")
    format: str = Field(description="Format of the weights.")
    kv_cache: str | None = Field(None, description="Format of the KV cache; None: the model's dtype.")
    release: str | None = Field(None, description="What an engine is for, such as TensorRT-LLM 1.2.1.")

    def __str__(self) -> str:
        model = f"{self.architecture}, {self.layers} layers of {self.hidden}"
        cache = f"{self.kv_cache} KV cache" if self.kv_cache is not None else None
        return ", ".join(word for word in (model, self.format, cache, self.release) if word is not None)


class _Record(Config):
    stage: Stage
    about: About
    bytes: int


@dataclass(frozen=True)
class Entry:
    """One artifact of the cache. `last_used`: seconds since 1970; `made`: distinguishes entries of the same name."""

    directory: Path
    stage: Stage
    about: About
    bytes: int
    last_used: float
    made: int

    @property
    def key(self) -> str:
        """The digest of the artifact's identity."""
        return self.directory.name

    @property
    def artifact(self) -> Path:
        """The artifact itself."""
        return self.directory / ARTIFACT

    @property
    def record(self) -> Path:
        """The file whose mtime is the time of the last use."""
        return self.directory / _RECORD

    @property
    def lock(self) -> Path:
        """The lock file of its key."""
        return lock_of(self.directory.parent)


def lock_of(directory: Path) -> Path:
    """The lock file of a key's directory, beside it."""
    return directory.with_suffix(".lock")


def write_entry(directory: Path, about: About, manifest: Manifest) -> None:
    """Write the record of the artifact in `directory`."""
    record = _Record(stage=manifest.identity.stage, about=about, bytes=manifest.total_bytes)
    (directory / _RECORD).write_text(record.model_dump_json())


def read_entry(directory: Path) -> Entry | None:
    """The entry; None if its record is missing or invalid."""
    path = directory / _RECORD
    try:
        record, status = _Record.model_validate(read_json(path, hint="")), path.stat()
        made = directory.stat().st_ino
    except (ForgeError, OSError, ValueError):
        return None
    return Entry(directory, record.stage, record.about, record.bytes, status.st_mtime, made)


def read_entries(directory: Path) -> tuple[Entry, ...]:
    """The entries of one key, by name, without the unfinished one of a killed process."""
    try:
        found = (read_entry(path) for path in sorted(directory.iterdir()) if path.name != NEW)
        return tuple(entry for entry in found if entry is not None)
    except OSError:
        return ()
