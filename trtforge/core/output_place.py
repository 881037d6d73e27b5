"""Checks before the work whether results can be written at a path: no foreign files, and write permission."""

import errno
import os
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.manifest import FILE_NAME, Manifest, Stage, is_foreign, read_manifest


def require_output(out: Path, stage: Stage) -> None:
    """Raise ForgeError unless an artifact of `stage` can be written at `out`, outside of other artifacts."""
    replaceable(out, stage)
    place = out.resolve()
    require_writable(place.parent)
    for above in place.parents:
        outer = _artifact(above)
        if outer is not None:
            raise ForgeError(
                f"{out} is inside of the {outer} {above}, which has only its own files",
                hint="Choose a directory beside it.",
            )


def _artifact(directory: Path) -> Stage | None:
    """The stage of the artifact at `directory`; None for any other directory, such as one with a forge.json of other
    software."""
    try:
        found = read_manifest(directory)
    except (ForgeError, OSError):
        return None
    return None if found is None else found.identity.stage


def require_writable(directory: Path) -> None:
    """Raise ForgeError unless this user can create files in `directory`, which need not exist yet."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ForgeError(f"{there} is a file, not a directory", hint="Choose another directory.")
    if not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        raise not_writable(directory, "Read-only file system" if read_only else "Permission denied")


def not_writable(directory: Path, reason: str | None) -> ForgeError:
    """The error for a directory in which this user cannot create files."""
    return ForgeError(f"{directory}: cannot write there: {reason}", hint="Choose an output directory you may write to.")


def not_lockable(directory: Path, error: OSError) -> ForgeError:
    """The error for a directory in which a lock file cannot be created or locked (flock)."""
    if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
        return not_writable(directory, error.strerror)
    return ForgeError(
        f"{directory}: files cannot be locked there: {error.strerror}",
        hint="Choose a directory on another file system. Lustre needs the mount option flock, NFS its lock service.",
    )


def replaceable(out: Path, stage: Stage) -> Manifest | None:
    """The manifest at `out`; None if there is none. Raises ForgeError unless `out` can be replaced by `stage`."""
    if not out.exists():
        return None
    if not out.is_dir():
        raise ForgeError(f"{out} is a file", hint="Choose another output directory.")
    manifest = read_manifest(out)
    if manifest is not None and manifest.identity.stage != stage:
        raise ForgeError(
            f"{out} is the result of another stage: {manifest.identity.stage}, not {stage}",
            hint="Choose another output directory.",
        )
    if manifest is not None and is_foreign(manifest):
        raise ForgeError(
            f"{out} was adopted, not written by trtforge: it is not replaced", hint="Choose another output directory."
        )
    unexpected = sorted(islice(_others(out, manifest.files if manifest else ()), 3))
    if unexpected:
        raise ForgeError(
            f"{out} has files that trtforge did not write ({', '.join(unexpected)})",
            hint="Choose another output directory, or move those files away.",
        )
    return manifest


def _others(out: Path, listed: Collection[str]) -> Iterator[str]:
    """Relative POSIX paths of all files and links below `out`, except `forge.json` and the `listed` ones.

    The caller takes only the first: `out` may be a home directory, or the root of the file system.
    """
    for place, directories, files in os.walk(out):
        links = (name for name in directories if Path(place, name).is_symlink())
        for name in (*files, *links):
            path = Path(place, name).relative_to(out).as_posix()
            if path != FILE_NAME and path not in listed:
                yield path


def require_removable(out: Path) -> None:
    """Raise ForgeError if this user cannot delete the content of the directory `out`, which a new artifact replaces."""
    if out.is_dir() and not os.access(out, os.W_OK | os.X_OK):
        raise ForgeError(
            f"{out} cannot be replaced: its files belong to another user",
            hint="Choose another output directory, or build as the user who wrote it.",
        )
