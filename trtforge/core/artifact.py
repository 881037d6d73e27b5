"""Publishing an artifact: whole or absent, a cache hit where it is already right, never somebody else's files."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.manifest import FileRecord, Identity, Manifest, check_files, files_below, read_manifest, record_of

Write = Callable[[Path], Mapping[str, FileRecord]]
"""Writes the files into the directory given; returns the records it computed on the way (the rest is read again)."""


@dataclass(frozen=True)
class Produced:
    """An artifact that is there now. `cached`: it was already."""

    path: Path
    manifest: Manifest
    cached: bool


def produce(out: Path, identity: Identity, write: Write, *, force: bool = False) -> Produced:
    """Make the artifact `identity` at `out` by `write`, or find it there.

    The work happens in the sibling `.<name>.partial`, which is renamed when complete, so a failure at any instant
    leaves what was at `out` before. Raises ForgeError if `out` holds anything that trtforge did not write.
    """
    given, out = out, out.resolve()  # a symlink stays one: what it points to is replaced
    partial, replaced = out.parent / f".{out.name}.partial", out.parent / f".{out.name}.replaced"
    with _locked(out):
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        existing = _replaceable(out, identity.stage)
        if existing is not None and not force and existing.identity == identity and check_files(out, existing) is None:
            return Produced(given, existing, cached=True)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            records = dict(write(partial))
            manifest = Manifest(
                identity=identity,
                files={name: records.get(name) or record_of(partial / name) for name in files_below(partial)},
            )
            manifest.write(partial)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise _failed(partial, error) from error
            raise
        if out.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            out.rename(replaced)
        partial.rename(out)
        shutil.rmtree(replaced, ignore_errors=True)
    return Produced(given, manifest, cached=False)


def _failed(partial: Path, error: OSError) -> ForgeError:
    """The system refused to read or write: which file, and why."""
    return ForgeError(
        f"{error.filename or partial.parent}: {error.strerror or error}",
        hint="Free space or choose another directory, then run again; what was there before is unharmed.",
    )


def _replaceable(out: Path, stage: str) -> Manifest | None:
    """The manifest at `out`; None if there is nothing. Raises ForgeError for anything but an artifact of `stage`."""
    if not out.exists():
        return None
    if not out.is_dir():
        raise ForgeError(f"{out} is a file", hint="Choose another output directory.")
    manifest = read_manifest(out)
    if manifest is not None and manifest.identity.stage != stage:
        raise ForgeError(
            f"{out} holds the result of another stage: {manifest.identity.stage}, not {stage}",
            hint="Choose another output directory.",
        )
    strangers = sorted(set(files_below(out)) - set(manifest.files if manifest else ()))
    if strangers:
        raise ForgeError(
            f"{out} holds files that trtforge did not write ({', '.join(strangers[:3])})",
            hint="Choose another output directory, or move those files away.",
        )
    return manifest


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Be the only process that makes the artifact at `out`; a second one waits here until the first is done."""
    path = out.parent / f".{out.name}.lock"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(path)
    except OSError as error:
        raise ForgeError(
            f"{out.parent}: cannot write there: {error.strerror}", hint="Choose an output directory you may write to."
        ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int:
    """An open descriptor that holds the lock file at `path`, never an unlinked one."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)
