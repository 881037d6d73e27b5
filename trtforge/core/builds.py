"""How build directories are recognised, also inside the directory of `trtforge build --quant F,F`."""

from contextlib import suppress
from pathlib import Path
from typing import get_args

from trtforge.core.errors import ForgeError, Repair
from trtforge.core.figures import listed

REPORT_FILE = "report.json"
RECIPE_FILE = "recipe.yaml"
"""The file of a build directory with the recipe derived for it."""

REPOSITORY = "repository"
_NAMED = 6  # most builds named in a message
_REPORTS = (REPORT_FILE, "report.html", "report.md")  # files that a build replaces besides artifacts


def base_name(repository: Path) -> str:
    """The name of a repository's directory, or of its build if it is in one."""
    place = repository.resolve()
    return place.parent.name if place.name == REPOSITORY else place.name


def builds_in(place: Path) -> tuple[Path, ...]:
    """The builds in a directory, by name; none if it is itself an artifact, a model or a build."""
    from trtforge.core.manifest import FILE_NAME  # commands import this module, and their --help no YAML

    if (place / FILE_NAME).is_file() or (place / "config.json").is_file() or is_build(place):
        return ()
    try:
        return tuple(path for path in sorted(place.iterdir()) if is_build(path))
    except OSError:
        return ()


def require_one_build(place: Path, *needed: str) -> None:
    """Raises ForgeError if `place` contains builds instead of being one.

    The hint names a build with one of the `needed` stages or files, and its repair replaces `place` in the command.
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


def require_build_directory(out: Path) -> None:
    """Raise ForgeError unless a build can be written in `out` without overwriting other files."""
    from trtforge.core.output_place import require_writable

    require_writable(out)
    others = [name for name in _REPORTS if (out / name).exists()]
    if others and not is_build(out):
        raise ForgeError(
            f"{out} is not a build, but has files named like a build's report: {listed(others)}",
            hint="Choose another directory with --out, or move them away.",
        )


def holds_builds(place: Path, builds: tuple[Path, ...], hint: str) -> ForgeError:
    """The error for a directory of builds if a single build is needed."""
    names = listed([build.name for build in builds], _NAMED)
    what = "build" if len(builds) == 1 else "builds"
    return ForgeError(f"{place} is not a build: it holds the {what} {names}", hint=hint)


def is_build(place: Path) -> bool:
    """Whether a directory has artifacts or the report of a build."""
    from trtforge.core.manifest import FILE_NAME, Stage

    known = (RECIPE_FILE, *(f"{stage}/{FILE_NAME}" for stage in get_args(Stage)))
    return place.is_dir() and (any((place / name).is_file() for name in known) or _is_report(place / REPORT_FILE))


def _is_report(path: Path) -> bool:
    """Whether a report.json was written by a build, not by another program."""
    from trtforge.core.json_text import read_json

    if not path.is_file():
        return False
    with suppress(ForgeError):
        found = read_json(path, hint="")
        return isinstance(found, dict) and {"recipe", "stages"} <= found.keys()
    return False
