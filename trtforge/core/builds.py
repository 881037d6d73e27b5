"""What a build directory is told by, and the directory of several builds that `trtforge build --quant F,F` writes."""

from pathlib import Path
from typing import get_args

from trtforge.core.errors import ForgeError, Repair
from trtforge.core.figures import listed

REPORT_FILE = "report.json"
RECIPE_FILE = "recipe.yaml"
"""Where a build directory keeps the recipe that was derived for it."""

_NAMED = 6  # builds that a message names


def builds_in(place: Path) -> tuple[Path, ...]:
    """The builds in a directory, by name; none if it is itself an artifact, a model or a build."""
    from trtforge.core.manifest import FILE_NAME  # commands import this module, and their --help no YAML

    if (place / FILE_NAME).is_file() or (place / "config.json").is_file() or _is_build(place):
        return ()
    try:
        return tuple(path for path in sorted(place.iterdir()) if _is_build(path))
    except OSError:
        return ()


def require_one_build(place: Path, *needed: str) -> None:
    """Raises ForgeError if `place` holds builds instead of being one.

    The hint names a build that has one of these stages or files, with the command if that is in its words.
    """
    builds = builds_in(place)
    if not builds:
        return
    whole = [build for build in builds if not needed or any((build / name).exists() for name in needed)]
    if whole:
        hint = f"Give one of them, such as {whole[0]}."
    elif needed == (RECIPE_FILE,):
        hint = "Give the recipe of one of them, and its directory with --out."
    else:
        hint = f"They have no {' or '.join(needed)} yet."
    repair = Repair(str(place), str(whole[0])) if whole else None
    raise holds_builds(place, builds, hint).repaired_by(repair)


def holds_builds(place: Path, builds: tuple[Path, ...], hint: str) -> ForgeError:
    """The error for a directory of builds where one of them is needed."""
    names = listed([build.name for build in builds], _NAMED)
    what = "build" if len(builds) == 1 else "builds"
    return ForgeError(f"{place} is not a build: it holds the {what} {names}", hint=hint)


def _is_build(place: Path) -> bool:
    from trtforge.core.manifest import FILE_NAME, Stage

    known = (RECIPE_FILE, REPORT_FILE, *(f"{stage}/{FILE_NAME}" for stage in get_args(Stage)))
    return place.is_dir() and any((place / name).is_file() for name in known)
