"""The partial directory of an artifact, and the record of its finished files: a run after a kill resumes from them.

`.finished.json` is replaced atomically, so that a kill at any time leaves a valid record. A file counts as finished
only while it has its recorded digest. As nothing is flushed, the digests also detect data lost in a power failure.
"""

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import read_json
from trtforge.core.manifest import FileRecord, Identity, fault_of, lies_below

RECORD = ".finished.json"


class Group(Config):
    """Files that were finished together, by relative POSIX path. `made_from`: digest of their inputs."""

    made_from: str
    files: dict[str, FileRecord]


class _Record(Config):
    identity: Identity
    groups: list[Group] = Field(default_factory=list)


class Finished:
    """The finished groups of files in the partial directory of one artifact."""

    def __init__(self, directory: Path, record: _Record) -> None:
        self._directory, self._record = directory, record

    @classmethod
    def begin(cls, directory: Path, identity: Identity) -> None:
        """Create `directory`, or delete everything except files that an earlier run of this identity finished."""
        found = _read(directory)
        groups = found.groups if found is not None and found.identity == identity else []
        groups = [group for group in groups if _is_whole(directory, group)]
        keep_only(directory, {name for group in groups for name in group.files})
        directory.mkdir(exist_ok=True)
        cls(directory, _Record(identity=identity, groups=groups))._write()

    @classmethod
    def read(cls, directory: Path) -> "Finished":
        """The record that `begin` and `add` wrote in `directory`. Raises ForgeError if it no longer exists."""
        record = _read(directory)
        if record is None:
            raise ForgeError(
                f"{directory / RECORD} disappeared or cannot be read any more",
                hint="Let nothing else change that directory, and check its disk; then run again.",
            )
        return cls(directory, record)

    @property
    def bytes(self) -> int:
        """Size of all finished files."""
        return sum(record.bytes for group in self._record.groups for record in group.files.values())

    @property
    def names(self) -> frozenset[str]:
        """All finished files."""
        return frozenset(name for group in self._record.groups for name in group.files)

    def group(self, names: Collection[str]) -> Group | None:
        """The group of exactly these files, if it is finished."""
        return next((group for group in self._record.groups if set(group.files) == set(names)), None)

    def add(self, group: Group) -> None:
        """Record a finished group; it replaces groups with files of the same names."""
        others = [other for other in self._record.groups if not set(other.files) & set(group.files)]
        self._record = _Record(identity=self._record.identity, groups=[*others, group])
        self._write()

    def _write(self) -> None:
        path = self._directory / RECORD
        new = path.with_suffix(".new")
        new.write_text(self._record.model_dump_json())
        os.replace(new, path)


def keep_finished(directory: Path) -> None:
    """Delete all unfinished files, and the directory if no file is finished."""
    record = _read(directory)
    keep_only(directory, {name for group in record.groups for name in group.files} if record else set())


def keep_only(directory: Path, names: Collection[str]) -> None:
    """Delete everything except these files and the record; without files, the whole directory."""
    if not names:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for path in directory.iterdir():
        if path.is_dir():
            keep_only(path, {name.removeprefix(f"{path.name}/") for name in names if name.startswith(f"{path.name}/")})
        elif path.name not in names and path.name != RECORD:
            path.unlink()


def _is_whole(directory: Path, group: Group) -> bool:
    return all(lies_below(name) and fault_of(directory / name, record) is None for name, record in group.files.items())


def _read(directory: Path) -> _Record | None:
    """The record; None if it is missing or invalid."""
    path = directory / RECORD
    try:
        return _Record.model_validate(read_json(path, hint=""))
    except (ForgeError, ValueError):
        return None
