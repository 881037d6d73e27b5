"""The cache of artifacts, so that calibrations, verifications and engines are computed once for all output directories.

An entry is a copy of an artifact under the digest of its identity. Hard links are not used: editing a file of OUT would
change the cache and every other OUT. On file systems with clones, copies are free. Each hit is verified by digest; a
damaged entry is dropped and built again. A lock per key makes processes that need the same artifact wait while one
builds it; the kernel releases the lock of a killed process.
"""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from trtforge.core.cache_entry import ARTIFACT, ARTIFACTS, NEW, About, Entry, lock_of, read_entries, write_entry
from trtforge.core.clone import clone_file
from trtforge.core.errors import ForgeError
from trtforge.core.locks import take_lock
from trtforge.core.manifest import FILE_NAME, Identity, Manifest, Stage, check_files, files_below, read_manifest
from trtforge.core.xdg import xdg_directory

VARIABLE = "TRTFORGE_CACHE"
_OFF = ("off", "none")
_TAG_FILE = "CACHEDIR.TAG"  # tells backup programs to skip it (bford.info/cachedir)
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by trtforge: `trtforge cache prune --all` empties it.\n"
_LOG = logging.getLogger(__name__)


def is_off() -> bool:
    """Whether the user switched the cache off."""
    return os.environ.get(VARIABLE, "").lower() in _OFF


def cache_directory() -> Path | None:
    """The user's cache directory, from TRTFORGE_CACHE or the platform's convention.

    None if TRTFORGE_CACHE is off or none, or if the user has no home directory, as in some containers.
    """
    if is_off():
        return None
    chosen = os.environ.get(VARIABLE, "")
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "trtforge"
        return xdg_directory("XDG_CACHE_HOME", ".cache")
    except RuntimeError:
        return None


def cache_for(about: About) -> "Cache | None":
    """The user's cache for artifacts with the description `about`; None if it is disabled."""
    directory = cache_directory()
    return Cache(directory, about) if directory is not None else None


@dataclass(frozen=True)
class Slot:
    """One artifact of the cache, while this process holds its lock. `found`: the verified entry.

    `store` copies an artifact into the cache; None if nothing is stored.
    """

    found: Entry | None = None
    store: Callable[[Path, Manifest], None] | None = None

    def copy_to(self, directory: Path) -> Manifest | None:
        """Copy the found artifact to `directory`; None if there is none. Raises OSError if copying fails."""
        if self.found is None:
            return None
        manifest = read_manifest(self.found.artifact)
        assert manifest is not None, "the entry was verified"
        shutil.rmtree(directory, ignore_errors=True)
        _copy(self.found.artifact, manifest, directory)
        with suppress(OSError):  # an entry of another user in a shared cache
            os.utime(self.found.record)
        return manifest

    def keep(self, artifact: Path, manifest: Manifest) -> None:
        """Store a copy of a new artifact. Failures are logged: they do not fail the build."""
        if self.store is not None:
            self.store(artifact, manifest)


@dataclass(frozen=True)
class Cache:
    """The cache below `root`, for artifacts with the description `about`."""

    root: Path
    about: About

    @contextmanager
    def slot(self, identity: Identity, late_inputs: Callable[[], Mapping[str, str]], *, afresh: bool) -> Iterator[Slot]:
        """The slot of an artifact with its lock: shared if it was found, exclusive if it must be built.

        The lock's key is the identity that is known before the work; `late_inputs` is called only if the key has
        entries. `afresh` ignores and replaces existing entries.
        """
        key = identity.digest
        while True:
            with self._held(key, identity.stage, shared=True) as usable:
                before = read_entries(self._of(key)) if usable and not afresh else ()
                wanted = identity.with_inputs(late_inputs()) if before else identity
                found = next((entry for entry in before if entry.key == wanted.digest), None)
                if not usable or (found is not None and _is_right(found, wanted)):
                    yield Slot(found)
                    return
            with self._held(key, identity.stage, shared=False) as usable:
                if not afresh and _names(read_entries(self._of(key))) != _names(before):
                    continue  # another process was faster
                if found is not None and usable:
                    shutil.rmtree(found.directory, ignore_errors=True)
                yield Slot(None, partial(self._store, key) if usable else None)
                return

    def _of(self, key: str) -> Path:
        return self.root / ARTIFACTS / key

    @contextmanager
    def _held(self, key: str, stage: Stage, *, shared: bool) -> Iterator[bool]:
        """Hold the lock of a key; yields False, with a warning, if the cache cannot be used."""

        def say() -> None:
            _LOG.warning("another process is building this %s: waiting for it", stage)

        descriptor = None
        try:
            self._of(key).mkdir(parents=True, exist_ok=True)
            with suppress(OSError), (self.root / _TAG_FILE).open("x") as file:  # fails in a read-only cache
                file.write(_TAG)
            descriptor = take_lock(lock_of(self._of(key)), shared=shared, waiting=say)
        except OSError as error:
            _warn_of_unusable(self.root, error.strerror or str(error))
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _store(self, key: str, artifact: Path, manifest: Manifest) -> None:
        """Copy an artifact into the cache; the final rename makes it an entry."""
        new = self._of(key) / NEW
        try:
            free = shutil.disk_usage(self.root).free
            if manifest.total_bytes > free // 2:
                raise OSError(f"it would take more than half of the {free:,} free bytes")
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            _copy(artifact, manifest, new / ARTIFACT)
            write_entry(new, self.about, manifest)
            target = self._of(key) / manifest.identity.digest
            shutil.rmtree(target, ignore_errors=True)
            new.rename(target)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            _LOG.warning("%s is not stored in the cache: %s", artifact, error.strerror or error)


@cache
def _warn_of_unusable(root: Path, reason: str) -> None:
    """Log once per process, not per stage, that a cache cannot be used."""
    _LOG.warning("the cache %s cannot be used: %s", root, reason)


def _is_right(entry: Entry, wanted: Identity) -> bool:
    """Whether an entry is the wanted artifact, byte by byte."""
    try:
        manifest = read_manifest(entry.artifact)
        if manifest is None:
            fault: str | None = f"{entry.artifact / FILE_NAME} is missing"
        elif manifest.identity != wanted or files_below(entry.artifact) != sorted(manifest.files):
            fault = f"{entry.artifact} does not match its record"
        else:
            fault = check_files(entry.artifact, manifest)
    except (OSError, ForgeError) as error:
        fault = str(error)
    if fault is not None:
        _LOG.warning("the cached %s is damaged and is built again: %s", entry.stage, fault)
    return fault is None


def _names(entries: tuple[Entry, ...]) -> set[tuple[str, int]]:
    return {(entry.key, entry.made) for entry in entries}


def _copy(artifact: Path, manifest: Manifest, target: Path) -> None:
    target.mkdir()
    for name in manifest.files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        clone_file(artifact / name, target / name)
    manifest.write(target)
