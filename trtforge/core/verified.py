"""Verify an artifact before it runs: exactly the manifest's files, each with its recorded digest.

Verified files are remembered in the user's cache by path, size, inode and time of the last change, so that an engine of
100 GB is not read again at every start, unless there is no cache.
"""

import logging
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field

from trtforge.core.cache_records import keep_cached, read_cached
from trtforge.core.config_model import Config
from trtforge.core.digest import text_digest
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import FILE_NAME, Manifest, Stage, damaged, fault_of, require_manifest

_SETTLED_NS = 2_000_000_000  # a change within one clock tick of the file system may leave its times unchanged
_LARGE = 10_000_000_000  # bytes above which verification is logged
_LOG = logging.getLogger(__name__)

_Stamp = tuple[int, int, int, int]
"""Size, inode, and the times of the last write and the last change of the inode, in ns."""


class _Record(Config):
    path: str
    manifest: str = Field(description="Digest of forge.json.")
    files: dict[str, _Stamp]


def open_to_run(directory: Path, stage: Stage) -> Manifest:
    """The manifest of an artifact that is about to run, after checking its files.

    Raises ForgeError if it is absent or of another stage, or has a missing, changed or unexpected file.
    """
    manifest = require_manifest(directory, stage)
    unexpected = next(_unexpected_files(directory, manifest), None)
    if unexpected is not None:
        raise ForgeError(
            f"{stage} {directory} has an unexpected file: {unexpected} is not listed in its {FILE_NAME}",
            hint=_remedy(directory, unexpected),
        )
    known = _remembered(directory, manifest)
    before = {name: _stamp(directory / name) for name in manifest.files}
    unknown = [name for name, stamp in before.items() if stamp is None or stamp != known.get(name)]
    size = sum(manifest.files[name].bytes for name in unknown)
    if size > _LARGE:
        _LOG.info(f"verifying {size / 1e9:,.0f} GB of {directory}, once until its files change")
    for name in unknown:
        problem = fault_of(directory / name, manifest.files[name])
        if problem is not None:
            raise damaged(directory, manifest, problem)
    if unknown:
        _remember(directory, manifest, known, before)
    return manifest


def remember_links(directory: Path, stage: Stage, verified: Path) -> None:
    """Remember the files of an artifact that are hard links to files of the verified artifact `verified`.

    A new link updates the inode's change time, so these files, the largest ones of a repository that is packaged again,
    would otherwise be read again.
    """
    manifest, other = require_manifest(directory, stage), require_manifest(verified, stage)
    known = _remembered(verified, other)
    contents = {(other.files[name].blake3, *stamp[:-1]) for name, stamp in known.items() if name in other.files}
    linked = {}
    for name, record in manifest.files.items():
        stamp = _stamp(directory / name)
        if stamp is not None and (record.blake3, *stamp[:-1]) in contents:
            linked[name] = stamp
    if linked:
        _keep(directory, _Record(path=str(directory.resolve()), manifest=manifest.digest, files=linked))


def _unexpected_files(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Relative paths of files below `directory` that the manifest does not list, links to directories included."""
    listed = {FILE_NAME, *manifest.files}
    parents = {parent.as_posix() for name in manifest.files for parent in Path(name).parents}

    def below(prefix: str) -> Iterator[str]:
        for entry in sorted(os.scandir(directory / prefix), key=lambda entry: entry.name):
            name = f"{prefix}{entry.name}"
            if entry.is_dir() and (name in parents or not entry.is_symlink()):
                yield from below(f"{name}/")
            elif name not in listed:
                yield name

    return below("")


def _remedy(directory: Path, unexpected: str) -> str:
    if Path(unexpected).parent.name != "__pycache__":
        return "Move that file away, or build the directory again."
    delete = shlex.join(["find", str(directory), "-name", "__pycache__", "-exec", "rm", "-r", "{}", "+"])
    return f"Python compiled it for a server that another program started. Delete what it compiled: `{delete}`."


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _key(directory: Path) -> str:
    return text_digest(str(directory.resolve()))


def _remembered(directory: Path, manifest: Manifest) -> Mapping[str, _Stamp]:
    """The verified files with their stamps at that time."""
    record = read_cached("verified", _key(directory), _Record)
    if record is None or (record.path, record.manifest) != (str(directory.resolve()), manifest.digest):
        return {}
    return record.files


def _remember(
    directory: Path, manifest: Manifest, known: Mapping[str, _Stamp], before: Mapping[str, _Stamp | None]
) -> None:
    """Record the files that changed neither while they were read nor just before."""
    now = time.time_ns()
    files = dict(known)
    for name, stamp in before.items():
        if stamp is not None and stamp == _stamp(directory / name) and now - max(stamp[2:]) > _SETTLED_NS:
            files[name] = stamp
    _keep(directory, _Record(path=str(directory.resolve()), manifest=manifest.digest, files=files))


def _keep(directory: Path, record: _Record) -> None:
    try:
        keep_cached("verified", _key(directory), record)
    except OSError as error:
        _LOG.warning("%s will be verified again: the cache cannot be written: %s", directory, error.strerror or error)
