"""Publish artifacts atomically: reuse them if up to date, and never replace files that trtforge did not write."""

import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtforge.core.cache import Cache, Slot
from trtforge.core.errors import ForgeError, LoggedError
from trtforge.core.figures import counted
from trtforge.core.locks import locked_by
from trtforge.core.manifest import (
    FILE_NAME,
    FileRecord,
    Identity,
    Manifest,
    check_files,
    files_below,
    record_of,
)
from trtforge.core.new_file import SHORTER_NAME
from trtforge.core.output_place import not_lockable, replaceable, require_removable
from trtforge.core.partial import RECORD, Finished, keep_finished
from trtforge.core.reading import CHECK_DISK, disk_fails

Write = Callable[[Path], Mapping[str, FileRecord]]
"""Writes the files into a directory; returns the records computed while writing (other files are read again)."""

LateInputs = Callable[[], Mapping[str, str]]
"""Digests of inputs that `write` reads anyway; computed earlier only to compare with an existing artifact."""

Origin = Literal["written", "already right", "from the cache"]
"""How an artifact was obtained."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Produced:
    """An artifact that exists now. `replaced`: the manifest of the artifact that it replaced, None without."""

    path: Path
    manifest: Manifest
    origin: Origin
    replaced: Manifest | None = None

    @property
    def cached(self) -> bool:
        """Whether nothing was computed."""
        return self.origin != "written"


def produce(
    out: Path,
    identity: Identity,
    write: Write,
    *,
    force: bool = False,
    late_inputs: LateInputs = dict,
    cache: Cache | None = None,
) -> Produced:
    """Write the artifact `identity` at `out` with `write`, or reuse it from `out` or from `cache`.

    The work is done in the sibling `.<name>.partial`, which is renamed when complete: a failure at any time leaves the
    previous content of `out`. An error deletes the partial directory, which frees disk space. A kill, an interruption
    or the failure of another program (LoggedError) keeps it, so that the next run of the same identity reuses the files
    that `write` recorded as finished (core.partial); `force` starts from scratch. Raises ForgeError if `out` has files
    that trtforge did not write. New artifacts are stored in `cache`.
    """
    given, partial, out = out, partial_directory(out), out.resolve()  # a symlink is kept; its target is replaced
    aside = out.parent / f".{out.name}.replaced"
    with _locked(out):
        try:
            _take_back(aside, out)
            existing = replaceable(out, identity.stage)
            origin: Origin = "already right"
            if existing is not None and not force and _is_right(out, existing, identity, late_inputs):
                manifest = existing
            else:
                require_removable(out)
                with cache.slot(identity, late_inputs, afresh=force) if cache else nullcontext(Slot()) as slot:
                    found = slot.copy_to(partial)
                    manifest = found or _make(partial, identity, write, late_inputs, afresh=force)
                    origin = "from the cache" if found else "written"
                    _publish(partial, out, aside)
                    if found is None:
                        slot.keep(out, manifest)
        except LoggedError:
            keep_finished(partial)
            raise
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                raise _failed(partial, error) from error
            raise
        except BaseException:
            keep_finished(partial)
            _log_kept_files(given, partial)
            raise
        finally:
            _take_back(aside, out)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)
    return Produced(given, manifest, origin, None if origin == "already right" else existing)


def _log_kept_files(out: Path, partial: Path) -> None:
    """Log the files of the artifact `out` that are kept after an interruption."""
    kept = None
    with suppress(ForgeError):  # nothing is kept
        kept = Finished.read(partial)
    if kept is None or not kept.names:
        _LOG.warning("%s was interrupted before a file was finished; its previous content is unchanged", out)
    else:
        files = counted(len(kept.names), "finished file")
        _LOG.warning(f"{out} was interrupted: {files} ({kept.bytes:,} bytes) are kept in {partial}")


def _publish(partial: Path, out: Path, replaced: Path) -> None:
    """Move the complete artifact to `out`; the previous content is kept in `replaced`.

    If `out` is the current directory, change to the new one, so that relative paths do not refer to the replaced one.
    """
    current = False
    if out.exists():
        with suppress(OSError):  # the current directory may have been deleted
            current = out.samefile(".")
        shutil.rmtree(replaced, ignore_errors=True)
        out.rename(replaced)
    partial.rename(out)
    if current:
        os.chdir(out)


def partial_directory(out: Path) -> Path:
    """The directory in which the artifact `out` is written."""
    out = out.resolve()
    return out.parent / f".{out.name}.partial"


def _take_back(replaced: Path, out: Path) -> None:
    """Undo a replacement that was interrupted between its two renames."""
    if replaced.exists() and not out.exists():
        replaced.rename(out)


def require_space(directory: Path, needed: int) -> None:
    """Raise ForgeError if the disk of `directory` has fewer than `needed` free bytes."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ForgeError(
            f"{directory.parent}: {needed:,} bytes are needed, {free:,} are free",
            hint="Free space or choose a directory on another disk, then run again.",
        )


def _is_right(out: Path, existing: Manifest, identity: Identity, late_inputs: LateInputs) -> bool:
    """Whether `out` is this artifact and undamaged. Expensive inputs are read only if everything else is equal."""
    return (
        identity.agrees_with(existing.identity)
        and identity.with_inputs(late_inputs()) == existing.identity
        and check_files(out, existing) is None
    )


def _make(partial: Path, identity: Identity, write: Write, late_inputs: LateInputs, *, afresh: bool) -> Manifest:
    """Write the complete artifact into `partial`."""
    if afresh:
        shutil.rmtree(partial, ignore_errors=True)
    Finished.begin(partial, identity)
    kept = Finished.read(partial)
    if kept.names:
        _LOG.info("resuming an interrupted run: %s bytes of files are finished", f"{kept.bytes:,}")
    records = dict(write(partial))
    whole = identity.with_inputs(late_inputs())
    (partial / RECORD).unlink()
    names = files_below(partial)
    manifest = Manifest(identity=whole, files={name: records.get(name) or record_of(partial / name) for name in names})
    manifest.write(partial)
    _copy_read_permissions(partial, names)
    return manifest


def _copy_read_permissions(directory: Path, names: Iterable[str]) -> None:
    """Give all files the read permissions of the manifest, which follow the user's umask.

    Some libraries, such as safetensors, write through a temporary file that only the user can read. Hard links are not
    changed, as they share their permissions with the original file.
    """
    usual = stat.S_IMODE((directory / FILE_NAME).stat().st_mode)
    for name in names:
        path = directory / name
        found = path.stat()
        mode = stat.S_IMODE(found.st_mode)
        if mode | usual != mode and found.st_nlink == 1:
            path.chmod(mode | usual)


def _failed(partial: Path, error: OSError) -> ForgeError:
    """The error for a failed read or write: file and reason; for a copy, the written file."""
    if error.errno == errno.ENOENT:
        remedy = "Let nothing else change that directory"
    elif disk_fails(error):
        remedy = CHECK_DISK.removesuffix(".")
    else:
        remedy = "Free space or choose another directory"
    return ForgeError(
        f"{error.filename2 or error.filename or partial.parent}: {error.strerror or error}",
        hint=f"{remedy}, then run again; the previous content is unchanged.",
    )


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the lock of the artifact at `out`; a second process waits until the first is done."""
    path = out.parent / f".{out.name}.lock"

    def say() -> None:
        _LOG.warning("another process is writing %s: waiting for it", out)

    with ExitStack() as held:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked_by(path, waiting=say))
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # the name of the lock file, if not of OUT itself
                raise ForgeError(f"{out}: {error.strerror}", hint=SHORTER_NAME) from None
            raise not_lockable(out.parent, error) from None
        yield
